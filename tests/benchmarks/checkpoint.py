"""Saving and loading 85 M parameters, beside a plain copy of the same bytes.

`python tests/benchmarks/checkpoint.py [--write]`: about two minutes. `--write` puts the table into
docs/checkpoints.md.
"""

import contextlib
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")

import psutil
import torch
from harness.workload import Workload
from peers.config import deepspeed_config

import spmdzero
from spmdzero.backend import runtime

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
REGION = re.compile(r"(<!-- begin benchmark -->\n).*?(<!-- end benchmark -->)", re.DOTALL)
ROUNDS = 5


def make_engine(**checkpoint: bool) -> spmdzero.Engine:
    workload = Workload(model="gpt-85m", devices=int(os.environ["CPU_NUM_DEVICES"]), steps=0)
    config = deepspeed_config(workload, stage=2) | {"checkpoint": checkpoint}
    return spmdzero.initialize(model=workload.build(), config=config)[0]


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


@contextlib.contextmanager
def peak_of_memory(found: list[float]) -> Iterator[None]:
    """Notes by how many bytes the process grew at most."""
    # Resets the high-water mark, which psutil has no call for.
    Path("/proc/self/clear_refs").write_text("5")
    before = psutil.Process().memory_info().rss
    yield
    status = Path("/proc/self/status").read_text()
    (high,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    found.append(int(high) * 1024 - before)


def copied(source: Path, target: Path) -> None:
    """A plain copy that, as a checkpoint, is on the disk when it ends."""
    shutil.copytree(source, target)
    for path in (*target.iterdir(), target):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def measure() -> str:
    engine, beside = make_engine(), make_engine(**{"async": True})
    times: dict[str, list[float]] = {}
    peaks: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        engine.save_checkpoint(folder / "warm", tag="t")  # compiles the split of parameters
        beside.save_checkpoint(folder / "warm beside", tag="t")
        beside.wait_checkpoint()
        size = sum(path.stat().st_size for path in (folder / "warm" / "t").iterdir())

        def note(name: str, act: Callable[[], object]) -> None:
            os.sync()
            with peak_of_memory(peaks.setdefault(name, [])):
                times.setdefault(name, []).append(seconds(act))

        for number in range(ROUNDS):
            saved = folder / f"saved {number}"
            note("save", lambda saved=saved: engine.save_checkpoint(saved, tag="t"))
            plain = folder / "copy"
            note("plain copy", lambda saved=saved, plain=plain: copied(saved / "t", plain))
            note("load", lambda saved=saved: load(engine, saved))
            later = folder / "later"
            note("stall of an asynchronous save", lambda later=later: beside.save_checkpoint(later))
            note("the rest of it, beside training", beside.wait_checkpoint)
            for used in (saved, plain, later):
                shutil.rmtree(used)
    return table(times, peaks, size)


def load(engine: spmdzero.Engine, folder: Path) -> None:
    engine.load_checkpoint(folder, tag="t")
    runtime.wait()


def table(times: dict[str, list[float]], peaks: dict[str, list[float]], size: int) -> str:
    plain = statistics.median(times["plain copy"])
    lines = [
        f"{size / 1e9:.2f} GB, {os.environ['CPU_NUM_DEVICES']} virtual devices on {os.cpu_count()} "
        f"CPU cores, medians of {len(times['save'])}; spmdzero {spmdzero.__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}.",
        "",
        "| | seconds | MB/s | of a plain copy | host memory, MB above before |",
        "|---|---|---|---|---|",
    ]
    for name, found in times.items():
        taken = statistics.median(found)
        shown = f"{size / taken / 1e6:.0f} | {plain / taken:.2f}"
        speed = shown if name in ("save", "plain copy", "load") else " | "
        peak = statistics.median(peaks[name]) / 1e6
        lines.append(f"| {name} | {taken:.2f} | {speed} | {peak:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    found = measure()
    print(found)
    if "--write" in sys.argv:
        page = PAGE.read_text()
        PAGE.write_text(REGION.sub(lambda match: match[1] + found + match[2], page))
