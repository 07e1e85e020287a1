"""How much is measured."""

import dataclasses

from on_tpu import cases

from harness import candidates as who
from harness.candidates import Candidate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """The models, the numbers of steps, and who takes part.

    Attributes:
        middle, wide, large: the GPTs.
        steps: timed steps of the middle one.
        wide_steps, large_steps: timed steps of the others.
        rounds: processes of each candidate of a table.
        everybody: who trains the middle GPT.
        fewer: who trains the others and the CNN.
        stage_3: who trains at ZeRO-3, and one at ZeRO-2 to compare with.
        series: who is followed over devices.
        counts: devices to follow them over.
        accumulation: micro-batches a step where stage 1 is compared with stage 0.
        tpu_size, tpu_cases, tpu_topologies, tpu_rows: what is compiled for TPUs, by names of
            `on_tpu.cases`; no rows for all.
        tpu_compile: whether what was not compiled for them before is; those rows are left out else.
    """

    middle: str = "gpt-10m"
    wide: str = "gpt-23m"
    large: str = "gpt-85m"
    steps: int = 8
    wide_steps: int = 5
    large_steps: int = 3
    rounds: int = 2
    everybody: tuple[Candidate, ...] = who.ALL
    fewer: tuple[Candidate, ...] = who.FEWER
    stage_3: tuple[Candidate, ...] = who.STAGE_3
    series: tuple[Candidate, ...] = (
        who.ZERO_2, who.DEEPSPEED_2, who.FSDP2, who.FSDPV2, who.JAX,
    )  # fmt: skip
    counts: tuple[int, ...] = (1, 2, 4, 8)
    accumulation: int = 8
    tpu_size: str = "full"
    tpu_cases: tuple[str, ...] = tuple(cases.CASES)
    tpu_topologies: tuple[str, ...] = cases.TOPOLOGIES
    tpu_rows: tuple[str, ...] | None = None
    tpu_compile: bool = True
