"""The page's sections: who trains what, and how the numbers are shown."""

import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping, Sequence

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
        small, middle, wide, large: the GPTs.
        steps: timed steps of the small and the middle one.
        wide_steps, large_steps: timed steps of the others.
        rounds: processes of each candidate of a table.
        everybody: who trains the middle GPT.
        fewer: who trains the others and the CNN.
        series: who is followed over devices and sizes.
        counts: devices to follow them over.
        accumulation: micro-batches a step where stage 1 is compared with stage 0.
    """

    small: str = "gpt-1m"
    middle: str = "gpt-10m"
    wide: str = "gpt-23m"
    large: str = "gpt-85m"
    steps: int = 8
    wide_steps: int = 5
    large_steps: int = 3
    rounds: int = 2
    everybody: tuple[Candidate, ...] = who.ALL
    fewer: tuple[Candidate, ...] = _FEWER
    series: tuple[Candidate, ...] = (who.ZERO_2, who.DEEPSPEED_2, who.FSDP2, who.JAX)
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


def peers(model: str, candidates: Sequence[Candidate], *, steps: int, rounds: int) -> list[str]:
    """The table of one model on 2 devices."""
    workload = Workload(model=model, devices=2, steps=steps)
    runs = run_all(workload, candidates, rounds=rounds)
    count = sum(parameter.numel() for parameter in workload.build_on_meta().parameters())
    head = (
        f"{count / 1e6:.1f} M parameters, {rounds} rounds of {workload.warm_up} + {steps} steps, "
        "2 devices or ranks, fp32."
    )
    return [head, *_table_of(runs)]


def _table_of(runs: report.Runs) -> list[str]:
    return ["", report.peer_table(runs), "", *report.remarks(runs), ""]


def devices(scale: Scale) -> list[str]:
    """Step time of the middle model over devices."""
    steps = max(1, scale.steps // 2)
    workloads = {
        str(count): Workload(model=scale.middle, devices=count, steps=steps)
        for count in scale.counts
    }
    return [
        "Seconds a step of the GPT of 10 M parameters. The cores stay the same, so more devices",
        "can't be faster: the columns show what splitting costs.",
        *_series(workloads, scale, title="devices or ranks"),
    ]


def sizes(scale: Scale) -> list[str]:
    """Step time over the size of the model, on 2 devices."""
    workloads = {
        size: Workload(model=model, devices=2, steps=steps)
        for size, model, steps in (
            ("1 M", scale.small, scale.steps),
            ("10 M", scale.middle, max(1, scale.steps // 2)),
            ("85 M", scale.large, scale.large_steps),
        )
    }
    return [
        "Seconds a step on 2 devices or ranks.",
        *_series(workloads, scale, title="parameters"),
    ]


def _series(workloads: Mapping[str, Workload], scale: Scale, *, title: str) -> list[str]:
    results = {
        column: run_all(workload, scale.series, rounds=scale.rounds)
        for column, workload in workloads.items()
    }
    notes = {column: report.noise_note(runs) for column, runs in results.items()}
    noise = [f"{title}, {column}: {note}" for column, note in notes.items() if note is not None]
    return ["", report.series_table(results, title=title), "", *noise]


def reductions(scale: Scale) -> list[str]:
    """Both ways in which a gradient can leave the replica region."""
    lines = ['`"spmd": {"reduction": ...}`, whose default on one axis is `annotated`.', ""]
    for model, count, steps in (
        (scale.middle, 2, scale.steps),
        (scale.middle, 8, max(1, scale.steps // 2)),
        (scale.large, 2, scale.large_steps),
    ):
        workload = Workload(model=model, devices=count, steps=steps)
        runs = run_all(workload, (who.ANNOTATED, who.EXPLICIT), rounds=scale.rounds)
        lines += [f"{model}, {count} devices:", *_table_of(runs)]
    return lines


def small_tensors(scale: Scale) -> list[str]:
    """Whole or sharded states of small tensors, and their gradients summed apart or together."""
    workload = Workload(model=scale.middle, devices=8, steps=max(1, scale.steps // 2))
    runs = run_all(workload, (who.ZERO_2, who.ALL_SHARDED, who.FEW_SHARDED), rounds=scale.rounds)
    lines = [
        "The GPT of 10 M parameters on 8 devices. Tensors of fewer than `min_shard_elements`",
        "elements keep whole states: their gradient is one all-reduce, and nothing is gathered.",
        *_table_of(runs),
    ]
    rows = []
    for count in (2, 8):
        answer = launch_alone("small_tensors", {"devices": count, "repeats": 25 * scale.steps})
        if isinstance(answer, Failure):
            return [*lines, *answer.lines]
        apart, together = (1000 * statistics.median(answer[way]) for way in ("apart", "together"))
        rows.append([str(count), f"{apart:.1f}", f"{together:.1f}", f"{apart / together:.1f}"])
    return [
        *lines,
        "What it would save on the CPU, whose compiler leaves them apart, to sum 42 gradients of",
        "400 elements as one tensor:",
        "",
        report.markdown(["devices", "apart, ms", "together, ms", "ratio"], rows),
    ]


def host_time(scale: Scale) -> list[str]:
    """What tracing costs the large model, and what captured and folded steps leave of it."""
    workload = Workload(model=scale.large, devices=2, steps=scale.large_steps)
    taking_part = (who.ZERO_2, who.TRACED, who.THREE_CALLS, who.THREE_TRACED)
    runs = run_all(workload, taking_part, rounds=1)
    rows, peaks = [], []
    for style, usual, traced in (
        ("`train_batch`", who.ZERO_2, who.TRACED),
        ("three calls", who.THREE_CALLS, who.THREE_TRACED),
    ):
        done = [runs[candidate.name][0] for candidate in (usual, traced)]
        failed = [run for run in done if isinstance(run, Failure)]
        if failed:
            return failed[0].lines
        less, more = (1000 * statistics.median(run.host_seconds) for run in done)
        rows.append([style, f"{more:.1f}", f"{less:.1f}", f"{more / less:.1f}"])
        after, before = (run.peak_rss / 2**20 for run in done)
        peaks.append([style, f"{before:.0f}", f"{after:.0f}", f"{after / before:.2f}"])
    head = [
        "Processor time of the thread that traces and launches, for one step of the GPT of 85 M",
        'parameters, 12 layers, under spmdzero ZeRO-2 on 2 devices: with `"spmd": {"capture":',
        "false}`, and without.",
        "",
    ]
    titles = ["", "traced, host ms", "captured or folded, host ms", "ratio"]
    memory = ["", "traced, peak MiB", "captured or folded, peak MiB", "ratio"]
    return [
        *(*head, report.markdown(titles, rows), ""),
        *("Highest resident memory of the same processes:", "", report.markdown(memory, peaks), ""),
        *_bare_replay(scale),
    ]


def _bare_replay(scale: Scale) -> list[str]:
    order = {"model": scale.large, "devices": 2, "steps": 5 * scale.large_steps}
    answer = launch_alone("bare_replay", order)
    if isinstance(answer, Failure):
        return answer.lines
    return [
        "In turns in one process: `train_batch` traced, captured, and the captured step started by",
        "hand with nothing checked or counted, where torch_xla starts a program of "
        f"{answer['inputs']} inputs",
        f"and {answer['outputs']} outputs, and its results take the places of the old state.",
        "",
        report.markdown(
            ["", "host ms", "traced / this"],
            [
                _host_row("`train_batch`, traced", answer, "traced"),
                _host_row("`train_batch`, captured", answer, "captured"),
                _host_row("by hand", answer, "bare"),
                _host_row("of that, torch_xla's start of the program", answer, "start"),
                _host_row("of that, putting the results in place", answer, "put"),
            ],
        ),
    ]


def _host_row(title: str, answer: Mapping[str, float], way: str) -> list[str]:
    return [title, f"{answer[way]:.1f}", f"{answer['traced'] / answer[way]:.1f}"]


def stacked_states(scale: Scale) -> list[str]:
    """Whether fewer, larger states would make a step cheaper."""
    rows = []
    for count in (2, 8):
        order = {"model": scale.large, "devices": count, "steps": 5 * scale.large_steps}
        answer = launch_alone("stacked_states", order)
        if isinstance(answer, Failure):
            return answer.lines
        # The same arithmetic in fp32, which two programs may round differently.
        if not math.isclose(answer["apart"]["sum"], answer["stacked"]["sum"], rel_tol=1e-6):
            return [f"**The two ways did not do the same work**: {answer}.", ""]
        for way, found in answer.items():
            times = [f"{found['host']:.1f}", f"{found['step']:.0f}"]
            rows.append([str(count), way, str(found["tensors"]), *times])
    return [
        "AdamW's update of all shards of the GPT of 85 M parameters, alone, compiled and started",
        "as a captured step is: with two states for each parameter, as spmdzero does, and with two",
        "for all parameters of the same shape, which their updates are cut from and put together",
        "in. The host's part is torch_xla's start of the program, which is handed the gradients",
        "too, and putting the results in place.",
        "",
        report.markdown(["devices", "states", "tensors written", "host ms", "ms a step"], rows),
    ]


def accumulation(scale: Scale) -> list[str]:
    """Stage 1 over stage 0 with many micro-batches, both in one process."""
    order = {
        "model": scale.middle,
        "devices": 2,
        "accumulation": scale.accumulation,
        "steps": 2 * scale.steps,
    }
    answer = launch_alone("accumulation", order)
    if isinstance(answer, Failure):
        return answer.lines
    zero, one = (statistics.median(answer[stage]) for stage in ("0", "1"))
    paired = statistics.median(b / a for a, b in zip(answer["0"], answer["1"], strict=True))
    rows = [["0", f"{zero:.4f}", ""], ["1", f"{one:.4f}", f"{paired:.3f}"]]
    head = (
        f"{scale.accumulation} micro-batches a step of the GPT of 10 M parameters on 2 devices; "
        "both engines\nin one process, step by step."
    )
    return [head, "", report.markdown(["stage", "s/step", "median ratio of neighbours"], rows), ""]


def time_of_a_step(scale: Scale) -> list[str]:
    """What the devices do during a step."""
    columns = []
    for model, steps in ((scale.middle, scale.steps), (scale.large, scale.large_steps)):
        answer = launch_alone("time_of_a_step", {"model": model, "devices": 2, "steps": steps})
        if isinstance(answer, Failure):
            return answer.lines
        step, busy = answer.pop("step"), answer.pop("busy")
        shown = {kind: [f"{ms:.0f}", f"{ms / step:.0%}"] for kind, ms in answer.items()}
        shown["the step"] = [f"{step:.0f}", ""]
        columns.append({**shown, "the cores are busy": ["", f"{busy:.0%}"]})
    rows = [[kind, *(cell for column in columns for cell in column[kind])] for kind in columns[0]]
    titles = ["", "10 M: ms a step and device", "of the step", "85 M: ms", "of the step"]
    return [
        "The GPTs of 10 M and 85 M parameters under spmdzero ZeRO-2 on 2 devices, by a trace of",
        "their steps. The last row is the processor time of the whole process, without the trace,",
        "over what all cores could have given.",
        "",
        report.markdown(titles, rows),
    ]


def matrix_products(scale: Scale) -> list[str]:
    """What torch and XLA's CPU compiler make of the same products, which are most of a step."""
    order = {"model": scale.wide, "devices": 2, "repeats": 4 * scale.wide_steps}
    answers = []
    for xnnpack in (False, True):
        answer = launch_alone("matrix_products", {**order, "xnnpack": xnnpack})
        if isinstance(answer, Failure):
            return answer.lines
        answers.append(answer)
    usual, with_xnnpack = answers
    rows = []
    for product, found in usual.items():
        torch, xla, other = found["torch"], found["xla"], with_xnnpack[product]["xla"]
        rows.append([product, f"{torch:.0f}", f"{xla:.0f}", f"{torch / xla:.2f}", f"{other:.0f}"])
    titles = ["", "torch", "XLA, as spmdzero sets it", "torch / XLA", "XLA with XNNPACK"]
    return [
        "Billions of operations a second in fp32 on both cores together, for products of the GPT",
        "of 23 M parameters: 2 threads with torch, as 2 ranks with a core each, beside 2 devices.",
        "Rows of the MLP's and the vocabulary's results are multiples of 8 KiB. XLA was seen to be",
        "slower at such results; the same products with 64 columns more show by how much.",
        "",
        report.markdown(titles, rows),
    ]


def start_up(scale: Scale) -> list[str]:
    """`initialize` beside moving parameters by hand."""
    warm, cold = [], []
    for count in (2, 8):
        order = {"model": scale.large, "devices": count, "repeats": 4}
        answer = launch_alone("start_up", {**order, "ways": list(_WAYS)})
        if isinstance(answer, Failure):
            return answer.lines
        # The first repetition compiles.
        medians = {way: statistics.median(taken[1:]) for way, taken in answer.items()}
        warm.append([str(count), *_beside_by_hand(medians)])
        first = {}
        for way in _WAYS:
            alone = launch_alone("start_up", {**order, "repeats": 1, "ways": [way]})
            if isinstance(alone, Failure):
                return alone.lines
            (first[way],) = alone[way]
        cold.append([str(count), *_beside_by_hand(first)])
    titles = ["devices", *_WAYS.values()]
    return [
        "Seconds until the GPT of 85 M parameters is on the devices, and the ratio to the quicker",
        "way of moving its parameters by hand. `initialize` also makes AdamW's states.",
        *("", report.markdown(titles, warm), ""),
        "The first time in a process, with what that compiles:",
        *("", report.markdown(titles, cold)),
    ]


_WAYS = {
    "upload_each": "upload each",
    "to_and_mark": "`.to` and mark",
    "from_cpu": "initialize",
    "from_meta": "initialize from meta",
}


def _beside_by_hand(seconds: Mapping[str, float]) -> list[str]:
    hand = min(seconds["upload_each"], seconds["to_and_mark"])
    return [f"{seconds[way]:.2f} ({seconds[way] / hand:.2f})" for way in _WAYS]
