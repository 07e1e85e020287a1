"""The page's sections that a script of their own measures, in one process."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness import report
from harness.launch import launch_alone
from harness.scale import Scale


def accumulation(scale: Scale) -> Iterator[str]:
    """Stage 1 over stage 0 with many micro-batches, both in one process."""
    answer = launch_alone(
        "accumulation",
        devices=2,
        backend="jax",
        model=scale.middle,
        accumulation=scale.accumulation,
        steps=2 * scale.steps,
    )
    zero, one = (statistics.median(answer[stage]) for stage in ("0", "1"))
    paired = statistics.median(b / a for a, b in zip(answer["0"], answer["1"], strict=True))
    yield (
        f"{scale.accumulation} micro-batches a step of the GPT of 10 M parameters on 2 devices; "
        "both engines\nin one process, step by step.\n"
    )
    rows = [["0", f"{zero:.4f}", ""], ["1", f"{one:.4f}", f"{paired:.3f}"]]
    yield report.markdown(["stage", "s/step", "median ratio of neighbours"], rows)


def time_of_a_step(scale: Scale) -> Iterator[str]:
    """What the devices do during a step."""
    columns = []
    for model, steps in ((scale.middle, scale.steps), (scale.large, scale.large_steps)):
        answer = launch_alone("time_of_a_step", devices=2, model=model, steps=steps)
        step, busy = answer.pop("step"), answer.pop("busy")
        shown = {kind: [f"{ms:.0f}", f"{ms / step:.0%}"] for kind, ms in answer.items()}
        shown["the step"] = [f"{step:.0f}", ""]
        columns.append({**shown, "the cores are busy": ["", f"{busy:.0%}"]})
    yield (
        "The GPTs of 10 M and 85 M parameters under spmdzero ZeRO-2 on 2 devices, by a trace of\n"
        "their steps on torch_xla, as JAX's CPU runtime records no operations. The last row is\n"
        "the processor time of the whole process, without the trace, over what all cores could\n"
        "have given.\n"
    )
    rows = [[kind, *(cell for column in columns for cell in column[kind])] for kind in columns[0]]
    titles = ["", "10 M: ms a step and device", "of the step", "85 M: ms", "of the step"]
    yield report.markdown(titles, rows)


def matrix_products(scale: Scale) -> Iterator[str]:
    """What torch and XLA's CPU compiler make of the same products, which are most of a step."""
    usual, with_xnnpack = (
        launch_alone(
            "matrix_products",
            devices=2,
            model=scale.wide,
            repeats=4 * scale.wide_steps,
            xnnpack=xnnpack,
        )
        for xnnpack in (False, True)
    )
    rows = []
    for product, found in usual.items():
        torch, xla, other = found["torch"], found["xla"], with_xnnpack[product]["xla"]
        rows.append([product, f"{torch:.0f}", f"{xla:.0f}", f"{torch / xla:.2f}", f"{other:.0f}"])
    yield (
        "Billions of operations a second in fp32 on both cores together, for products of the GPT\n"
        "of 23 M parameters: 2 threads with torch, as 2 ranks with a core each, beside 2 devices.\n"
        "Rows of the MLP's and the vocabulary's results are multiples of 8 KiB. XLA was seen to\n"
        "be slower at such results; the same products with 64 columns more show by how much.\n"
    )
    titles = ["", "torch", "XLA, as spmdzero sets it", "torch / XLA", "XLA with XNNPACK"]
    yield report.markdown(titles, rows)


_CLIENTS = {
    "trainer": "transformers' `Trainer`",
    "accelerate": "accelerate",
    "lightning": "Lightning's `Trainer`",
}


def clients(scale: Scale) -> Iterator[str]:
    """What a client's loop adds to a step."""
    yield (
        "A GPT-2 of transformers of 85 M parameters, 128 tokens a step, on 2 devices with JAX's\n"
        "backend: three calls of an engine in turns with a client's loop, in a process for each\n"
        "client. Both train at stage 2 with AdamW. The client loads its data and reads a loss\n"
        "every ten steps; Trainer moves a schedule too.\n"
    )
    rows, spread = [], []
    for client, name in _CLIENTS.items():
        steps = 10 * scale.large_steps
        found = launch_alone(
            "clients", devices=2, backend="jax", client=client, model=scale.large, steps=steps
        )
        for way, title in (("bare", "three calls"), ("client", name)):
            times = [f"{found[way]['whole'] / 1e3:.3f}", f"{found[way]['host']:.1f}"]
            of = ["1.00"] if way == "bare" else [f"{found['ratio']:.2f}"]
            rows.append([title, *times, *of, str(found[way]["compiled"])])
        low, high = found["quartiles"]
        spread.append(f"{name} {low:.2f} to {high:.2f}")
    titles = ["", "s/step", "host ms", "median ratio of neighbours", "compiled after the 3rd step"]
    yield report.markdown(titles, rows)
    yield f"\nThe middle half of the ratios: {', '.join(spread)}."


_WAYS = {
    "upload_each": "upload each",
    "to_and_mark": "`.to` and mark",
    "from_cpu": "initialize",
    "from_meta": "initialize from meta",
}


def start_up(scale: Scale) -> Iterator[str]:
    """`initialize` beside moving parameters by hand."""

    def seconds(devices: int, repeats: int, *ways: str) -> dict[str, list[float]]:
        return launch_alone(
            "start_up", devices=devices, model=scale.large, repeats=repeats, ways=ways
        )

    warm, cold = [], []
    for count in (2, 8):
        # The first repetition compiles.
        usual = {way: statistics.median(t[1:]) for way, t in seconds(count, 4, *_WAYS).items()}
        first = {way: seconds(count, 1, way)[way][0] for way in _WAYS}
        warm.append([str(count), *_beside_by_hand(usual)])
        cold.append([str(count), *_beside_by_hand(first)])
    titles = ["devices", *_WAYS.values()]
    yield (
        "Seconds until the GPT of 85 M parameters is on the devices, and the ratio to the quicker\n"
        "way of moving its parameters by hand. `initialize` also makes AdamW's states.\n"
    )
    yield report.markdown(titles, warm)
    yield "\nThe first time in a process, with what that compiles:\n"
    yield report.markdown(titles, cold)
    yield (
        "\nSeconds until a command, or an import, of a fresh process is done, and the ratio to\n"
        "`import torch`:\n"
    )
    yield report.markdown(["", "seconds"], _commands(repeats=5))


def _commands(*, repeats: int) -> list[list[str]]:
    """The median of each, which take turns: the machine's load is the same for all."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "ds_config.json")
        config.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
        command = ["-m", "spmdzero"]
        lines = {
            "`import torch`": ["-c", "import torch"],
            "`import torch, spmdzero`": ["-c", "import torch, spmdzero"],
            "`import spmdzero; spmdzero.initialize`": ["-c", "import spmdzero as s; s.initialize"],
            "`spmdzero --help`": [*command, "--help"],
            "`spmdzero --version`": [*command, "--version"],
            "`spmdzero check ds_config.json`": [*command, "check", str(config)],
            "`spmdzero doctor`": [*command, "doctor"],
        }
        taken: dict[str, list[float]] = {name: [] for name in lines}
        for _ in range(repeats):
            for name, words in lines.items():
                start = time.monotonic()
                subprocess.run([sys.executable, *words], check=True, capture_output=True)
                taken[name].append(time.monotonic() - start)
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    beside = medians["`import torch`"]
    return [[name, f"{median:.2f} ({median / beside:.2f})"] for name, median in medians.items()]


def _beside_by_hand(seconds: Mapping[str, float]) -> list[str]:
    hand = min(seconds["upload_each"], seconds["to_and_mark"])
    return [f"{seconds[way]:.2f} ({seconds[way] / hand:.2f})" for way in _WAYS]


_STARTED = {"ours": "spmdzero ZeRO-2", "by_hand": "jax.jit ZeRO-2 by hand"}


def second_start(scale: Scale) -> Iterator[str]:
    """A process that compiles, and one that finds what another has compiled."""
    rows, titles = [], [""]
    for peer, name in _STARTED.items():
        with tempfile.TemporaryDirectory() as folder:
            for which, repeats in (("first", 1), ("second", scale.rounds)):
                found = [
                    launch_alone(
                        "second_start",
                        devices=2, backend="jax", peer=peer, model=scale.large, folder=folder,
                    )
                    for _ in range(repeats)
                ]  # fmt: skip
                titles = ["", "start", *found[0]]
                parts = [statistics.median(one[part] for one in found) for part in found[0]]
                rows.append([name, which, *(f"{seconds:.2f}" for seconds in parts)])
    yield (
        "Seconds from the start of a process to the end of the first step of the GPT of 85 M\n"
        'parameters on 2 devices: with `"spmd": {"compile_cache": ...}`, and by hand with JAX\'s\n'
        "own cache. A first start finds the folder empty. All import torch, and build the model\n"
        "with it.\n"
    )
    yield report.markdown(titles, rows)
