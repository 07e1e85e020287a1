"""What several hosts cost beside one: start-up, agreement, input, step, checkpoint.

`python tests/benchmarks/several_hosts.py [--write]`: about ten minutes. The same 23 M parameters
and 8 virtual devices are driven by 1, 2, 4 and 8 processes of this machine, on the JAX backend.
`--write` puts the table into docs/hosts.md.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

DEVICES, BATCHES, STEPS, ROUNDS = 8, 200, 4, 2
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "hosts.md"
REGION = re.compile(r"(<!-- begin benchmark -->\n).*?(<!-- end benchmark -->)", re.DOTALL)


def work(folder: Path) -> dict[str, float]:
    """What one host finds; all come here."""
    import torch
    from harness.workload import ROWS, Workload
    from peers.config import deepspeed_config
    from torch.utils.data import TensorDataset

    import spmdzero
    from spmdzero.backend import runtime

    workload = Workload(model="gpt-23m", devices=DEVICES, steps=STEPS)
    found = {"imported": since_start()}
    spmdzero.init_distributed()
    found["met"] = since_start()
    model, data = workload.build(), [workload.batch(step) for step in range(4)]
    rows = TensorDataset(*(torch.cat(parts).repeat(50, 1) for parts in zip(*data, strict=True)))
    settings = deepspeed_config(workload, stage=2)
    with Agreement() as agreed:
        engine, _, loader, _ = spmdzero.initialize(model=model, config=settings, training_data=rows)
        engine.train_batch()
        runtime.wait()
    found["first step"] = since_start()
    found["agreement"] = sum(agreed)

    def joint(act: Callable[[], object], name: str) -> None:
        spmdzero.comm.barrier()
        start = time.perf_counter()
        act()
        spmdzero.comm.barrier()
        found[name] = time.perf_counter() - start

    def train() -> None:
        for _ in range(STEPS):
            engine.train_batch()
        runtime.wait()

    def load() -> None:
        engine.load_checkpoint(folder, tag="t")
        runtime.wait()

    train()  # Until the steps are captured.
    joint(train, "step")
    joint(lambda: [batch for batch, _ in zip(loader, range(BATCHES), strict=False)], "input")
    engine.save_checkpoint(folder / "warm", tag="t")
    joint(lambda: engine.save_checkpoint(folder, tag="t"), "save")
    joint(load, "load")
    found["step"] /= STEPS
    found["input"] = ROWS * min(BATCHES, len(loader)) / found["input"]
    return found


class Agreement:
    """Notes the seconds of each comparison of what the hosts have, its waiting included."""

    def __enter__(self) -> list[float]:
        from spmdzero.engine import _setup

        self._module, self._own, taken = _setup, {}, []
        for name in ("require_same_settings", "require_same_structure", "require_same_values"):
            self._own[name] = plain = getattr(_setup, name)
            setattr(_setup, name, timed(plain, taken))
        return taken

    def __exit__(self, *_: object) -> None:
        for name, plain in self._own.items():
            setattr(self._module, name, plain)


def timed(act: Callable[..., object], taken: list[float]) -> Callable[..., None]:
    def timing(*given: object) -> None:
        start = time.perf_counter()
        act(*given)
        taken.append(time.perf_counter() - start)

    return timing


def since_start() -> float:
    """Seconds since this process began."""
    return time.time() - psutil.Process().create_time()


def run(count: int) -> list[dict[str, float]]:
    """What each of `count` hosts finds."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (__file__, "--work", folder)
        launch = ("launch", "--hosts", str(count), "--devices-per-host", str(DEVICES // count))
        done = subprocess.run(
            [sys.executable, "-m", "spmdzero", *launch, *arguments],
            env={**os.environ, "SPMDZERO_BACKEND": "jax", "PJRT_DEVICE": "CPU"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        files = (Path(folder, f"found-{rank}.json") for rank in range(count))
        found = [json.loads(file.read_text()) for file in files]
        size = sum(file.stat().st_size for file in Path(folder, "t").iterdir())
    return [{**host, "bytes": size} for host in found]


def measured() -> str:
    """The table."""
    lines = [
        f"{DEVICES} virtual devices on {os.cpu_count()} CPU cores, medians of {ROUNDS}; "
        f"Python {platform.python_version()}.",
        "",
        "| processes | meeting, s | start to first step, s | agreement, s | step, ms | "
        "loader, rows/s | save, MB/s | load, MB/s |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for count in (1, 2, 4, 8):
        rounds = [run(count) for _ in range(ROUNDS)]

        def last(name: str, rounds: list[list[dict[str, float]]] = rounds) -> float:
            """Of the host that takes longest."""
            return statistics.median(max(host[name] for host in hosts) for hosts in rounds)

        # The host that comes last waits for none.
        agreed = statistics.median(min(host["agreement"] for host in hosts) for hosts in rounds)
        meeting = statistics.median(
            min(host["met"] - host["imported"] for host in hosts) for hosts in rounds
        )
        megabytes = last("bytes") / 1e6
        rows = statistics.median(min(host["input"] for host in hosts) for hosts in rounds)
        lines.append(
            f"| {count} | {meeting:.2f} | {last('first step'):.1f} | {agreed:.3f} | "
            f"{last('step') * 1e3:.0f} | {rows:.0f} | {megabytes / last('save'):.0f} | "
            f"{megabytes / last('load'):.0f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        rank = int(os.environ.get("RANK", "0"))
        found = work(given.work)
        Path(given.work, f"found-{rank}.json").write_text(json.dumps(found))
        return
    table = measured()
    if given.write:
        page = PAGE.read_text()
        PAGE.write_text(REGION.sub(lambda match: match[1] + table + match[2], page))


if __name__ == "__main__":
    main()
