"""The page's sections in which candidates train beside each other."""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from harness import candidates as who
from harness import report
from harness.candidates import Candidate
from harness.launch import launch, launch_alone
from harness.processes import ProcessFailedError
from harness.protocol import Run
from harness.scale import Scale
from harness.workload import Workload

Section: TypeAlias = Callable[[Scale], Iterator[str]]


def run_all(
    workload: Workload, candidates: Sequence[Candidate], *, rounds: int, gpu: bool = False
) -> report.Runs:
    """Candidate name -> its runs; they take turns, so that a slow minute hits all."""
    runs: dict[str, list[Run | ProcessFailedError]] = {each.name: [] for each in candidates}
    for turn in range(rounds):
        for candidate in candidates:
            print(
                f"{workload.model}, {workload.devices} devices, round {turn + 1} of {rounds}: "
                f"{candidate.name}",
                file=sys.stderr,
            )
            runs[candidate.name].append(launch(workload, candidate, gpu=gpu))
    return runs


def peers(model: str, candidates: str, steps: str, *, counts: Sequence[int] = (2,)) -> Section:
    """A table of one model for each number of devices; each name is one of a field of the scale."""

    def section(scale: Scale) -> Iterator[str]:
        named = getattr(scale, model, model)
        workloads = [
            Workload(model=named, devices=count, steps=getattr(scale, steps)) for count in counts
        ]
        size = sum(parameter.numel() for parameter in workloads[0].build_on_meta().parameters())
        yield (
            f"{size / 1e6:.1f} M parameters, {scale.rounds} rounds of {workloads[0].warm_up} + "
            f"{workloads[0].steps} steps, fp32.\n"
        )
        for workload in workloads:
            runs = run_all(workload, getattr(scale, candidates), rounds=scale.rounds)
            yield f"{workload.devices} devices or ranks:"
            yield from _table_of(runs)

    return section


def _table_of(runs: report.Runs) -> Iterator[str]:
    yield from ("", report.peer_table(runs), "", *report.remarks(runs), "")


def devices(scale: Scale) -> Iterator[str]:
    """Step time of the middle model over devices."""
    steps = max(1, scale.steps // 2)
    yield (
        "Seconds a step of the GPT of 10 M parameters. The cores stay the same, so more devices\n"
        "can't be faster: the columns show what splitting costs."
    )
    results = {}
    for count in scale.counts:
        workload = Workload(model=scale.middle, devices=count, steps=steps)
        results[str(count)] = run_all(workload, scale.series, rounds=scale.rounds)
    yield from ("", report.series_table(results, title="devices or ranks"), "")
    for column, runs in results.items():
        if (note := report.noise_note(runs)) is not None:
            yield f"devices or ranks, {column}: {note}"


def reductions(scale: Scale) -> Iterator[str]:
    """Both ways in which a gradient can leave the replica region."""
    yield '`"spmd": {"reduction": ...}`, whose default on one axis is `annotated`.\n'
    for model, count, steps in (
        (scale.middle, 2, scale.steps),
        (scale.middle, 8, max(1, scale.steps // 2)),
        (scale.large, 2, scale.large_steps),
    ):
        workload = Workload(model=model, devices=count, steps=steps)
        runs = run_all(workload, (who.ANNOTATED, who.EXPLICIT), rounds=scale.rounds)
        yield f"{model}, {count} devices:"
        yield from _table_of(runs)


def stage_3(scale: Scale) -> Iterator[str]:
    """ZeRO-3 beside its peers, over models and devices."""
    yield (
        "Parameters are shards between steps, gathered where they are used, in the forward and\n"
        "again in the backward, which is the wire of 3 passes over them. By hand it is JAX's\n"
        "rematerialisation that gathers them again. XLA on the CPU joins both gathers: it keeps\n"
        "what was gathered, and has the wire of 2. FSDPv2 only annotates the weights: GSPMD\n"
        "gathers some, and for others moves activations by all-to-alls, which are smaller in these "
        "batches:\n"
        "its wire is the shortest, and with the large model on 8 devices that outweighs the rest.\n"
        "Activations grow with the batch, parameters don't.\n"
    )
    for model, count, steps in (
        (scale.wide, 2, scale.wide_steps),
        (scale.wide, 8, scale.large_steps),
        (scale.large, 2, scale.large_steps),
        (scale.large, 8, scale.large_steps),
    ):
        workload = Workload(model=model, devices=count, steps=steps)
        yield f"{model}, {count} devices:"
        yield from _table_of(run_all(workload, scale.stage_3, rounds=scale.rounds))


def small_tensors(scale: Scale) -> Iterator[str]:
    """Whole or sharded states of small tensors, and their gradients summed apart or together."""
    workload = Workload(model=scale.middle, devices=8, steps=max(1, scale.steps // 2))
    runs = run_all(workload, (who.ZERO_2, who.ALL_SHARDED, who.FEW_SHARDED), rounds=scale.rounds)
    yield (
        "The GPT of 10 M parameters on 8 devices. Tensors of fewer than `min_shard_elements`\n"
        "elements keep whole states: their gradient is one all-reduce, and nothing is gathered."
    )
    yield from _table_of(runs)
    rows = []
    for count in (2, 8):
        answer = launch_alone("small_tensors", devices=count, repeats=25 * scale.steps)
        apart, together = (1000 * statistics.median(answer[way]) for way in ("apart", "together"))
        rows.append([str(count), f"{apart:.1f}", f"{together:.1f}", f"{apart / together:.1f}"])
    yield (
        "What it would save on the CPU, whose compiler leaves them apart, to sum 42 gradients of\n"
        "400 elements as one tensor:\n"
    )
    yield report.markdown(["devices", "apart, ms", "together, ms", "ratio"], rows)


def host_time(scale: Scale) -> Iterator[str]:
    """What the large model's Python costs, and what captured steps leave of it."""
    workload = Workload(model=scale.large, devices=2, steps=scale.large_steps)
    styles = {
        "`train_batch`": (who.TRACED, who.ZERO_2),
        "three calls": (who.THREE_TRACED, who.THREE_CALLS),
    }
    runs = run_all(workload, [each for pair in styles.values() for each in pair], rounds=1)
    times, peaks = [], []
    for style, pair in styles.items():
        done = [runs[candidate.name][0] for candidate in pair]
        for run in done:
            if isinstance(run, ProcessFailedError):
                raise run
        more, less = (1000 * statistics.median(run.host_seconds) for run in done)
        times.append([style, f"{more:.1f}", f"{less:.1f}", f"{more / less:.1f}"])
        before, after = (run.peak_rss / 2**20 for run in done)
        peaks.append([style, f"{before:.0f}", f"{after:.0f}", f"{after / before:.2f}"])
    yield (
        "Processor time of the thread that traces and launches, for one step of the GPT of 85 M\n"
        'parameters, 12 layers, under spmdzero ZeRO-2 on 2 devices: with `"spmd": {"capture":\n'
        "false}`, and without.\n"
    )
    titles = ["", "traced, host ms", "captured, host ms", "ratio"]
    yield report.markdown(titles, times)
    yield "\nHighest resident memory of the same processes:\n"
    memory = ["", "traced, peak MiB", "captured, peak MiB", "ratio"]
    yield report.markdown(memory, peaks)
