"""Explaining a model under a config, or a live engine."""

import copy
import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spmdzero.config import load_config
from spmdzero.engine import Engine, initialize
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain._aot import (
    Compiled,
    compile_for_tpu,
    require_tpu_compiler,
)
from spmdzero.explain._chips import CHIPS, Topology
from spmdzero.explain._explanation import Explanation
from spmdzero.explain._fit import TargetMemory, stage_fit, step_memory
from spmdzero.explain._moves import ProgramLedger, floor_elements, measure_moves
from spmdzero.explain._roofline import Roofline, roofline
from spmdzero.explain._trace import Batch, TracedProgram, trace_step
from spmdzero.inspect import CollectiveLedger, read_matmuls
from spmdzero.plan import Role, ShardingPlan, itemsize
from spmdzero.xla import map_tensors, runtime

logger = logging.getLogger("spmdzero")


def explain(
    model: nn.Module,
    config: str | os.PathLike[str] | dict[str, Any],
    batch: Batch,
    *,
    tpu: Iterable[str] = (),
    stages: Sequence[int] = (0, 1, 2),
) -> Explanation:
    """Whether a step fits, what it moves and what it waits for; `model` stays as it is.

    A copy of the model trains one step at each of the stages, on this process's devices; 8
    virtual ones on the CPU, say, by ``CPU_NUM_DEVICES=8``.

    Args:
        model: returns its loss. On the CPU.
        config: path of a DeepSpeed JSON, or its dict.
        batch: what one forward takes: a tensor, a tuple of inputs or a dict of keyword inputs,
            with the rows of one micro-batch of all devices.
        tpu: topologies such as ``"v5e:2x4"`` of as many chips as this process has devices; needs
            the extra ``spmdzero[tpu]``, no TPU.
        stages: which to compile; the config's always is. The others are planned.

    Raises:
        SpmdZeroUsageError: a topology that is unknown, or of another number of chips.
        SpmdZeroRuntimeError: jax or libtpu is missing, or the compiler failed.
        SpmdZeroError: whatever `initialize` raises.
    """
    topologies = _topologies(tpu)
    source = load_config(config).source
    engine, *_ = initialize(model=copy.deepcopy(model), config=source)
    explained = trace_step(engine, batch)
    compiled = {engine.plan.stage: _on_targets(explained, topologies)}
    for stage in set(stages) - {engine.plan.stage}:
        other, *_ = initialize(model=copy.deepcopy(model), config=_at_stage(source, stage))
        compiled[stage] = _on_targets(trace_step(other, batch), topologies)
    return _put_together(engine, explained, compiled, batch)


def explain_engine(
    engine: Engine, *inputs: Any, tpu: Iterable[str] = (), **named: Any
) -> Explanation:
    """Whether this engine's step fits, what it moves and what it waits for.

    Trains one step: `gradient_accumulation_steps` micro-batches of these inputs. Only the
    engine's own stage is compiled; `spmdzero.explain` compiles all three and trains nothing.

    Args:
        inputs, named: the module's own, as `engine(...)` takes them; it returns its loss.
        tpu: as in `explain`.

    Raises:
        SpmdZeroUsageError: a topology that is unknown, or of another number of chips.
        SpmdZeroRuntimeError: jax or libtpu is missing, or the compiler failed.
    """
    if inputs and named:
        bound = inspect.signature(engine.module.forward).bind(*inputs, **named)
        inputs, named = (), dict(bound.arguments)
    batch = named or inputs
    topologies = _topologies(tpu)
    programs = trace_step(engine, batch)
    compiled = {engine.plan.stage: _on_targets(programs, topologies)}
    return _put_together(engine, programs, compiled, batch)


def _topologies(names: Iterable[str]) -> list[Topology]:
    topologies = [Topology.parse(name) for name in names]
    here = runtime.device_count()
    for topology in topologies:
        if topology.devices != here:
            raise SpmdZeroUsageError(
                f"{topology.name} has {topology.devices} chips and this process {here} devices. A "
                "program is traced for as many devices as it is compiled for: on the command line "
                f"`spmdzero explain ... --tpu {topology.name}` sees to it, or start Python with "
                f"CPU_NUM_DEVICES={topology.devices} PJRT_DEVICE=CPU"
            )
    if topologies:
        require_tpu_compiler()
    return topologies


def _at_stage(source: Mapping[str, Any], stage: int) -> dict[str, Any]:
    section = source.get("zero_optimization", {})
    return {**source, "zero_optimization": {**section, "stage": stage}}


@dataclass(frozen=True, kw_only=True)
class _Target:
    """A step's programs as one compiler made them; `topology` is None for this process's own."""

    name: str
    topology: Topology | None
    programs: tuple[Compiled, ...]

    def memory(self) -> TargetMemory:
        return TargetMemory(
            target=self.name,
            memory=step_memory(self.programs),
            hbm_bytes=self.topology.chip.hbm_bytes if self.topology else None,
        )


def _on_targets(programs: Sequence[TracedProgram], topologies: Sequence[Topology]) -> list[_Target]:
    here = f"{runtime.platform().lower()}:{runtime.device_count()}"
    targets = [_Target(name=here, topology=None, programs=tuple(p.compiled for p in programs))]
    for topology in topologies:
        logger.info("compiling %d programs for %s", len(programs), topology.name)
        compiled = tuple(compile_for_tpu(p.annotated, topology) for p in programs)
        targets.append(_Target(name=topology.name, topology=topology, programs=compiled))
    return targets


def _put_together(
    engine: Engine,
    programs: Sequence[TracedProgram],
    compiled: Mapping[int, Sequence[_Target]],
    batch: Batch,
) -> Explanation:
    plan, own = engine.plan, compiled[engine.plan.stage]
    accumulation = engine.gradient_accumulation_steps()
    tokens = accumulation * _tokens(batch) // plan.mesh.size
    return Explanation(
        stage=plan.stage,
        mesh=str(plan.mesh),
        devices=plan.mesh.size,
        accumulation=accumulation,
        tokens=tokens,
        fits=tuple(
            stage_fit(plan, stage, [t.memory() for t in compiled.get(stage, ())])
            for stage in (0, 1, 2)
        ),
        paper_note=plan.compare().paper_note,
        moves=tuple(
            measure_moves(
                plan,
                [
                    ProgramLedger(
                        kind=p.kind, runs=p.runs, ledger=CollectiveLedger.from_hlo(made.hlo)
                    )
                    for p, made in zip(programs, target.programs, strict=True)
                ],
                target=target.name,
                topology=target.topology,
            )
            for target in own
        ),
        rooflines=tuple(_rooflines(plan, programs, own, tokens)),
    )


def _rooflines(
    plan: ShardingPlan,
    programs: Sequence[TracedProgram],
    targets: Sequence[_Target],
    tokens: int,
) -> Iterator[Roofline]:
    matmul_flops = sum(
        2 * p.runs * product.macs for p in programs for product in read_matmuls(p.compiled.hlo)
    )
    # Parameters and gradients cross the wire in the parameters' dtype.
    width = max((itemsize(tensor.dtype(Role.PARAMETER)) for tensor in plan), default=4)
    floor_bytes = floor_elements(plan) * width
    on_tpu = [target for target in targets if target.topology is not None]
    for target in on_tpu:
        assert target.topology is not None
        runs = [(p.runs, made) for p, made in zip(programs, target.programs, strict=True)]
        yield roofline(
            target.topology.chip,
            target=target.name,
            flops=sum(n * (made.flops or 0.0) for n, made in runs),
            matmul_flops=matmul_flops,
            bytes_accessed=sum(n * (made.bytes_accessed or 0.0) for n, made in runs),
            wire_bytes=sum(n * CollectiveLedger.from_hlo(made.hlo).wire_bytes for n, made in runs),
            tokens=tokens,
        )
    for chip in () if on_tpu else CHIPS.values():
        yield roofline(
            chip,
            target=chip.name,
            flops=matmul_flops,
            matmul_flops=matmul_flops,
            bytes_accessed=None,
            wire_bytes=floor_bytes,
            tokens=tokens,
        )


def _tokens(batch: Batch) -> int:
    """Positions of the first batch of integers, or rows of the first tensor, on all devices."""
    tensors: list[torch.Tensor] = []
    map_tensors(batch, lambda _, tensor: tensors.append(tensor) or tensor)
    first = next((t for t in tensors if not t.is_floating_point() and t.dim() > 1), None)
    if first is not None:
        return first.shape[0] * first.shape[1]
    return tensors[0].shape[0]
