"""The result of `explain`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from spmdzero._document import Document
from spmdzero.audit import AuditReport
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain._attention import AttentionUse
from spmdzero.explain._fit import StageFit
from spmdzero.explain._moves import Moves
from spmdzero.explain._refused_scatters import RefusedScatter
from spmdzero.explain._roofline import Roofline
from spmdzero.explain._time import StepTime
from spmdzero.explain._verdict import Verdict
from spmdzero.plan import sized

# Scalars and vectors that are reduced whole cost less than this multiple of the floor.
_NEAR_THE_FLOOR = 1.02
# Of what a device sends: gradients of adapters and biases are seldom more, however many there are.
_LITTLE = 0.01


@dataclass(frozen=True, kw_only=True)
class Explanation(Document):
    """Tells whether a training step fits, its traffic, its faults, and its time.

    Attributes:
        stage: the ZeRO stage of the config.
        mesh: the mesh, e.g. ``fsdp=8``.
        devices: number of devices of the mesh.
        accumulation: number of micro-batches in one step.
        tokens: number per device and step: positions of integer inputs, or rows of other inputs.
        counted: whether `tokens` counts positions (``"token"``) or rows (``"row"``).
        xla_flags: the TPU compiler's flags, as ``name=value``.
        fits: the memory of the stages 0 to 3.
        paper_note: when the ZeRO paper's formula applies, or why it doesn't here.
        moves: the traffic of the config's stage on each target that compiled it.
        audit: faults found in the programs and, if steps were trained, in the steps.
        rooflines: compute, memory and network time, on each chip.
        attention: calls of attention that are kernels in the programs for TPUs, and the others.
        tpu_note: why these programs are the CPU's, "" if they were traced for TPUs.
        times: the time of a step on each TPU that it was compiled for.
        verdicts: whether the config's stage fits each TPU; without a TPU, its memory on the CPU.
        model: the class of the model and its size, in words.
        config: the DeepSpeed JSON.
        notes: how each "auto" of the config is read.
    """

    _named: ClassVar[str] = "an explanation"

    stage: int
    mesh: str
    devices: int
    accumulation: int
    tokens: int
    xla_flags: tuple[str, ...]
    fits: tuple[StageFit, ...]
    paper_note: str
    moves: tuple[Moves, ...]
    audit: AuditReport
    rooflines: tuple[Roofline, ...]
    attention: tuple[AttentionUse, ...] = ()
    tpu_note: str = ""
    times: tuple[StepTime, ...] = ()
    counted: Literal["token", "row"] = "token"
    verdicts: tuple[Verdict, ...] = ()
    model: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def moves_on(self, target: str) -> Moves:
        """The traffic on one target.

        Raises:
            SpmdZeroUsageError: the target is not among the explained ones.
        """
        for moves in self.moves:
            if moves.target == target:
                return moves
        known = ", ".join(moves.target for moves in self.moves)
        raise SpmdZeroUsageError(f"nothing was compiled for {target!r}, only for {known}")

    def fit_at(self, stage: int) -> StageFit:
        """The memory of one stage, 0 to 3."""
        return self.fits[stage]

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons for which `--strict` fails: no room, the audit's findings, costly refusals."""
        found = [
            f"{memory.target}: stage {self.stage} needs {sized(memory.memory.peak)} of "
            f"{sized(memory.hbm_bytes or 0)}"
            for memory in self.fits[self.stage].compiled
            if memory.fits is False
        ]
        found += [f"{f.name}: {f.subject} ({f.evidence})" for f in self.audit.findings]
        for moves in self.moves:
            dear = moves.over_floor > _NEAR_THE_FLOOR and moves.cost_of_refused > _LITTLE
            if dear and not moves.target.startswith("cpu"):
                found += [f"{moves.target}: {line}" for line in _by_reason(moves.refused)]
        return tuple(found)

    def time_on(self, target: str) -> StepTime:
        """The time of a step on one TPU.

        Raises:
            SpmdZeroUsageError: the step was not compiled for that target, or doesn't fit there.
        """
        for time in self.times:
            if time.target == target:
                return time
        known = ", ".join(time.target for time in self.times) or "no TPU"
        raise SpmdZeroUsageError(
            f"how long a step takes on {target!r} is not known, only on {known}: "
            f"explain(..., tpu=[{target!r}])"
        )

    def over_budget(self, seconds: float) -> tuple[str, ...]:
        """A sentence for each target on which a step takes longer than `seconds`.

        There is also one for each TPU on which the step has no time because it doesn't fit.
        """
        fitting = {time.target for time in self.times}
        return (
            *(
                f"{time.target}: a step takes {1e3 * time.seconds:,.3f} ms, "
                f"{time.seconds / seconds:.2f} x the budget of {1e3 * seconds:,.3f} ms"
                for time in self.times
                if time.seconds > seconds
            ),
            *(
                f"{memory.target}: a step has no time to hold against the budget of "
                f"{1e3 * seconds:,.3f} ms: it doesn't fit"
                for memory in self.fits[self.stage].compiled
                if memory.hbm_bytes is not None and memory.target not in fitting
            ),
        )


def _by_reason(refused: Sequence[RefusedScatter]) -> Iterator[str]:
    """A line for each reason, with the first gradient and the number of those with the same."""
    names: dict[str, list[str]] = {}
    for each in refused:
        names.setdefault(each.reason, []).append(each.tensor)
    for reason, (first, *others) in names.items():
        yield f"{first}{f' and {len(others)} more' if others else ''}: {reason}"
