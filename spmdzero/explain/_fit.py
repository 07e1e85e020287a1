"""Compares four accounts of a step's memory side by side."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spmdzero.explain._aot import CompilerMemory
from spmdzero.plan import (
    MemoryReport,
    Role,
    ShardingPlan,
)


@dataclass(frozen=True, kw_only=True)
class TargetMemory:
    """A compiler's account of one stage on one target.

    Attributes:
        target: ``cpu:8``, ``v5e:2x4``, ...
        memory: bytes per device of the whole step, all its programs.
        hbm_bytes: memory of one device; None on the CPU.
    """

    target: str
    memory: CompilerMemory
    hbm_bytes: int | None

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the device's memory; None on the CPU."""
        return None if self.hbm_bytes is None else self.memory.peak <= self.hbm_bytes


@dataclass(frozen=True, kw_only=True)
class StageFit:
    """The memory of one ZeRO stage, bytes per device.

    Attributes:
        stage: 0 to 3.
        paper: bytes by ZeRO's formula (arXiv 1910.02054, section 5); None if it doesn't apply.
        deepspeed: DeepSpeed's estimate, which exists for stage 2 (runtime/zero/stage_1_and_2.py).
        plan: the exact bytes of the plan, by role.
        compiled: each compiler's account; empty for a stage that was not compiled.
    """

    stage: int
    paper: int | None
    deepspeed: int | None
    plan: MemoryReport
    compiled: tuple[TargetMemory, ...]

    @property
    def states(self) -> int:
        """Bytes that live between steps by the plan: all roles except the gradient at the step."""
        return self.plan.total - self.plan[Role.GRADIENT]


def fit_of_stages(
    plan: ShardingPlan, compiled: Mapping[int, Sequence[TargetMemory]]
) -> tuple[StageFit, ...]:
    """The accounts of each stage for the model of `plan`; `compiled` has the compilers'."""
    comparison = plan.compare()
    parameters = sum(math.prod(tensor.shape) for tensor in plan)
    # The same formula as spmdzero.zero.estimate_zero2_model_states_mem_needs without offload.
    estimate = 2 * parameters + int(18 * parameters / plan.mesh.size)
    return tuple(
        StageFit(
            stage=stage,
            paper=comparison.paper[stage] if comparison.paper else None,
            deepspeed=estimate if stage == 2 else None,
            plan=planned,
            compiled=tuple(compiled.get(stage, ())),
        )
        for stage, planned in enumerate(comparison.stages)
    )
