"""The ways to run one step that are compared."""

import dataclasses
import importlib.util


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the step.

    Attributes:
        name: as the table shows it.
        spmd: the config's "spmd" section; None runs real DeepSpeed.
    """

    name: str
    spmd: dict[str, str] | None


GLOBAL = Candidate(name="spmdzero, global forward", spmd={"forward": "global"})
ANNOTATED = Candidate(name="spmdzero, region, annotated", spmd={"reduction": "annotated"})
EXPLICIT = Candidate(name="spmdzero, region, explicit", spmd={"reduction": "explicit"})
DEEPSPEED = Candidate(name="DeepSpeed, gloo", spmd=None)


def candidates_for(what: str) -> list[Candidate]:
    """Who takes part in `--what`; ratios refer to the first."""
    if what == "host":
        return [ANNOTATED]
    peer = [DEEPSPEED] if importlib.util.find_spec("deepspeed") else []
    return [GLOBAL, ANNOTATED, EXPLICIT, *peer]
