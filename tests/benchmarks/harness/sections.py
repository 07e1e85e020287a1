"""The page's sections: who trains what, and how the numbers are shown."""

import dataclasses
import statistics
import sys
from collections.abc import Sequence

from harness import candidates as who
from harness import report
from harness.candidates import Candidate
from harness.launch import launch, launch_alone
from harness.protocol import Failure, Run
from harness.workload import Workload

_FEWER = (
    who.ZERO_2, who.EXPLICIT, who.DEEPSPEED_2, who.FSDP2, who.DDP, who.FSDPV2, who.XLA_DDP, who.JAX,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured.

    Attributes:
        small, middle, large: the GPTs.
        steps: timed steps of the small and the middle one.
        large_steps: timed steps of the large one.
        rounds: processes of each candidate of the main table.
        everybody: who trains the middle GPT.
        fewer: who trains the large GPT and the CNN.
        series: who is followed over devices and sizes; among the others too.
        counts: devices to follow them over, 2 among them.
        accumulation: micro-batches a step where stage 1 is compared with stage 0.
    """

    small: str = "gpt-1m"
    middle: str = "gpt-10m"
    large: str = "gpt-85m"
    steps: int = 8
    large_steps: int = 3
    rounds: int = 2
    everybody: tuple[Candidate, ...] = who.ALL
    fewer: tuple[Candidate, ...] = _FEWER
    series: tuple[Candidate, ...] = (who.ZERO_2, who.DEEPSPEED_2, who.JAX)
    counts: tuple[int, ...] = (1, 2, 4, 8)
    accumulation: int = 8


def run_all(workload: Workload, candidates: Sequence[Candidate], *, rounds: int) -> report.Runs:
    """Candidate name -> its runs; they take turns, so that a slow minute hits all."""
    runs: dict[str, list[Run | Failure]] = {candidate.name: [] for candidate in candidates}
    for turn in range(rounds):
        for candidate in candidates:
            print(
                f"{workload.model}, {workload.devices} devices, round {turn + 1} of {rounds}: "
                f"{candidate.name}",
                file=sys.stderr,
            )
            runs[candidate.name].append(launch(workload, candidate))
    return runs


def peers(
    model: str, candidates: Sequence[Candidate], *, steps: int, rounds: int
) -> tuple[list[str], report.Runs]:
    """The table of one model on 2 devices, and what it was made from."""
    workload = Workload(model=model, devices=2, steps=steps)
    runs = run_all(workload, candidates, rounds=rounds)
    count = sum(parameter.numel() for parameter in workload.build_on_meta().parameters())
    head = (
        f"{count / 1e6:.1f} M parameters, {rounds} rounds of {workload.warm_up} + {steps} steps, "
        "2 devices or ranks, fp32."
    )
    return [head, "", report.peer_table(runs), "", *report.remarks(runs), ""], runs


def devices(scale: Scale, known: report.Runs) -> list[str]:
    """Step time of the middle model over devices; 2 devices are known."""
    results: dict[str, report.Runs] = {}
    for count in scale.counts:
        if count == 2:
            results["2"] = {c.name: known[c.name] for c in scale.series}
        else:
            workload = Workload(model=scale.middle, devices=count, steps=max(1, scale.steps // 2))
            results[str(count)] = run_all(workload, scale.series, rounds=1)
    return [report.series_table(results, title="devices or ranks"), ""]


def sizes(scale: Scale, middle: report.Runs, large: report.Runs) -> list[str]:
    """Step time over the size of the model, on 2 devices."""
    workload = Workload(model=scale.small, devices=2, steps=scale.steps)
    small = run_all(workload, scale.series, rounds=1)
    results = {
        "1 M": small,
        "10 M": {c.name: middle[c.name] for c in scale.series},
        "85 M": {c.name: large[c.name] for c in scale.series},
    }
    return [report.series_table(results, title="parameters"), ""]


def reductions(scale: Scale) -> list[str]:
    """Both ways in which a gradient can leave the replica region."""
    workload = Workload(model=scale.middle, devices=2, steps=scale.steps)
    runs = run_all(workload, (who.ANNOTATED, who.EXPLICIT), rounds=scale.rounds)
    return [report.peer_table(runs), "", *report.remarks(runs), ""]


def host_time(scale: Scale) -> list[str]:
    """What tracing costs the large model, and what captured and folded steps leave of it."""
    workload = Workload(model=scale.large, devices=2, steps=scale.large_steps)
    taking_part = (who.ZERO_2, who.TRACED, who.THREE_CALLS, who.THREE_TRACED)
    runs = run_all(workload, taking_part, rounds=1)
    rows = []
    for style, usual, traced in (
        ("`train_batch`", who.ZERO_2, who.TRACED),
        ("three calls", who.THREE_CALLS, who.THREE_TRACED),
    ):
        done = [runs[candidate.name][0] for candidate in (usual, traced)]
        failed = [run for run in done if isinstance(run, Failure)]
        if failed:
            return [f"failed: `{failed[0].headline}`", ""]
        less, more = (1000 * statistics.median(run.host_seconds) for run in done)
        rows.append([style, f"{more:.1f}", f"{less:.1f}", f"{more / less:.1f}"])
    titles = ["", "traced, host ms", "captured or folded, host ms", "ratio"]
    return [report.markdown(titles, rows), "", *_bare_replay(scale)]


def _bare_replay(scale: Scale) -> list[str]:
    order = {"model": scale.large, "devices": 2, "steps": 5 * scale.large_steps}
    answer = launch_alone("bare_replay", order)
    if isinstance(answer, Failure):
        return [f"failed: `{answer.headline}`", ""]
    return [
        "What of a captured step is torch_xla's own: uploading the batch, starting a program of",
        f"{answer['inputs']} inputs and {answer['outputs']} outputs, putting these in their place,",
        "letting go of what was there. Done by hand, with nothing checked or counted, in turns",
        "with `train_batch`:",
        f"{answer['bare']:.1f} ms beside {answer['captured']:.1f} ms.",
        "",
    ]


def accumulation(scale: Scale) -> list[str]:
    """Stage 1 over stage 0 with many micro-batches, both in one process."""
    order = {
        "model": scale.small,
        "devices": 2,
        "accumulation": scale.accumulation,
        "steps": 4 * scale.steps,
    }
    answer = launch_alone("accumulation", order)
    if isinstance(answer, Failure):
        return [f"failed: `{answer.headline}`", ""]
    zero, one = (statistics.median(answer[stage]) for stage in ("0", "1"))
    paired = statistics.median(b / a for a, b in zip(answer["0"], answer["1"], strict=True))
    rows = [["0", f"{zero:.4f}", ""], ["1", f"{one:.4f}", f"{paired:.3f}"]]
    return [report.markdown(["stage", "s/step", "median ratio of neighbours"], rows), ""]


def time_of_a_step(scale: Scale) -> list[str]:
    """What the devices do during a step."""
    columns = []
    for model, steps in ((scale.middle, scale.steps), (scale.large, scale.large_steps)):
        answer = launch_alone("time_of_a_step", {"model": model, "devices": 2, "steps": steps})
        if isinstance(answer, Failure):
            return [f"failed: `{answer.headline}`", ""]
        step = answer.pop("step")
        shown = {kind: [f"{ms:.0f}", f"{ms / step:.0%}"] for kind, ms in answer.items()}
        columns.append({**shown, "the step": [f"{step:.0f}", ""]})
    rows = [[kind, *(cell for column in columns for cell in column[kind])] for kind in columns[0]]
    titles = ["", "10 M: ms a step and device", "of the step", "85 M: ms", "of the step"]
    return [report.markdown(titles, rows), ""]


def start_up(scale: Scale) -> list[str]:
    """`initialize` beside moving parameters by hand."""
    rows = []
    for count in (2, 8):
        order = {"model": scale.large, "devices": count, "repeats": 4}
        answer = launch_alone("start_up", order)
        if isinstance(answer, Failure):
            return [f"failed: `{answer.headline}`", ""]
        # The first repetition compiles.
        medians = {way: statistics.median(taken[1:]) for way, taken in answer.items()}
        hand = min(medians["upload_each"], medians["to_and_mark"])
        cells = [f"{medians[way]:.2f} ({medians[way] / hand:.2f})" for way in medians]
        rows.append([str(count), *cells])
    titles = ["devices", "upload each", "`.to` and mark", "initialize", "initialize from meta"]
    return [report.markdown(titles, rows), ""]
