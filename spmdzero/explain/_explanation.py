"""What an explanation says."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from spmdzero._display import Shown, page_of
from spmdzero.audit import AuditReport
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain._attention import AttentionUse
from spmdzero.explain._fit import StageFit
from spmdzero.explain._moves import Moves
from spmdzero.explain._roofline import Roofline
from spmdzero.explain._time import StepTime
from spmdzero.explain._verdict import Verdict
from spmdzero.plan import sized

# Scalars and vectors reduced whole cost less than this.
_NEAR_THE_FLOOR = 1.02


@dataclass(frozen=True, kw_only=True)
class Explanation(Shown):
    """Whether a training step fits, what it moves, what is wrong, how long it takes.

    Attributes:
        stage: the ZeRO stage of the config.
        mesh: the mesh, e.g. ``fsdp=8``.
        devices: devices of the mesh.
        accumulation: micro-batches in one step.
        tokens: per device and step: positions of integer inputs, rows of others.
        counted: which of them.
        xla_flags: the TPU compiler's flags, as ``name=value``.
        fits: the memory of the stages 0 to 3.
        paper_note: when the ZeRO paper's formula applies, or why it doesn't here.
        moves: the traffic of the config's stage on each target that compiled it.
        audit: what is wrong in the programs and, where steps were trained, with those.
        rooflines: compute, memory and network time, on each chip.
        attention: what of it is a kernel in the programs for TPUs, and what isn't and why.
        tpu_note: why those programs are the CPU's, "" where they were traced for TPUs.
        times: how long a step takes on each TPU that it was compiled for.
        verdicts: whether the config's stage fits each TPU, or how much it takes on the CPU where
            none is named.
        model: the class of the model and its size, in words.
        config: the DeepSpeed JSON.
        notes: what stands for each "auto" of the config.
    """

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
        """The memory of one stage: 0, 1 or 2."""
        return self.fits[stage]

    @property
    def problems(self) -> tuple[str, ...]:
        """What `--strict` fails for: no room, the audit's findings, refusals that cost traffic."""
        found = [
            f"{memory.target}: stage {self.stage} needs {sized(memory.memory.peak)} of "
            f"{sized(memory.hbm_bytes or 0)}"
            for memory in self.fits[self.stage].compiled
            if memory.fits is False
        ]
        found += [f"{f.name}: {f.subject} ({f.evidence})" for f in self.audit.findings]
        for moves in self.moves:
            if not moves.target.startswith("cpu") and moves.over_floor > _NEAR_THE_FLOOR:
                found += [f"{moves.target}: {r.tensor}: {r.reason}" for r in moves.refused]
        return tuple(found)

    def time_on(self, target: str) -> StepTime:
        """How long a step takes on one TPU.

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

        Also for each TPU on which it has no time because it doesn't fit.
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

    def to_json(self) -> str:
        """The explanation as JSON text that `from_json` reads."""
        return _ADAPTER.dump_json(self, indent=2).decode()

    @classmethod
    def from_json(cls, text: str) -> "Explanation":
        """The explanation that `to_json` wrote.

        Raises:
            SpmdZeroUsageError: not the JSON text of an explanation.
        """
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as wrong:
            raise SpmdZeroUsageError(f"not the JSON text of an explanation: {wrong}") from wrong

    def to_html(self) -> str:
        """A page that needs nothing from outside, readable in dark and light."""
        return page_of(self).document()


_ADAPTER = TypeAdapter(Explanation)
