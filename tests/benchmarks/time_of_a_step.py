"""What the devices do during a step: a trace of captured steps, by kind of operation.

XLA's CPU runtime records an event for each operation that it starts. A matrix product that its
thread pool cuts into tasks goes on after its event, without one.
"""

import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import jax
from harness.workload import Workload
from peers.config import deepspeed_config

import spmdzero
from spmdzero.backend import runtime

# The kinds, in the order in which a name is tried; XLA's CPU runtime names events after thunks.
KINDS = (
    ("waiting for the other devices", re.compile(r"Wait: pending_threads|Rendezvous")),
    ("collectives", re.compile(r"all-reduce|all-gather|reduce-scatter|all-to-all|collective")),
    ("matrix products", re.compile(r"dot|convolution")),
    ("copies and transposes", re.compile(r"copy|[Tt]ranspose")),
)
OTHER = "elementwise and reductions"
REST = "no event: tasks of matrix products, and nothing to do"
WARM_UP = 5


def measure(model: str, devices: int, steps: int) -> dict[str, float]:
    """Milliseconds a step and device of each kind, and of the whole step under "step".

    Under "busy" how much of all cores the process had.
    """
    workload = Workload(model=model, devices=devices, steps=steps)
    config = deepspeed_config(workload, stage=2)
    engine, *_ = spmdzero.initialize(model=workload.build(), config=config)

    def train(first: int, count: int) -> float:
        start = time.perf_counter()
        for step in range(first, first + count):
            engine.train_batch(iter([workload.batch(step)])).item()
            runtime.wait()
        return time.perf_counter() - start

    train(0, WARM_UP)
    processor = time.process_time()
    whole = train(WARM_UP, steps) / steps
    busy = (time.process_time() - processor) / (steps * whole * (os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as folder:
        with spmdzero.profile(
            engine, steps=range(WARM_UP + steps, WARM_UP + 2 * steps), folder=folder
        ):
            train(WARM_UP + steps, steps + 1)
        (trace,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        kinds = by_kind(trace)
    shares = {kind: kinds[kind] / devices / steps / 1e6 for kind in [*(k for k, _ in KINDS), OTHER]}
    rest = 1e3 * whole - sum(shares.values())
    return {"step": 1e3 * whole, "busy": busy, **shares, REST: rest}


def by_kind(trace: Path) -> Counter[str]:
    """Nanoseconds of each kind, over all threads that run thunks, without what runs inside."""
    found: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            if "XLAEigen" in (line.name or ""):
                events = ((e.start_ns, e.duration_ns, e.name) for e in line.events)
                found.update(_own_time(events))
    return found


def _own_time(events: Iterable[tuple[float, float, str]]) -> Counter[str]:
    own: Counter[str] = Counter()
    open_events: list[tuple[float, str]] = []
    for start, duration, name in sorted(events, key=lambda event: (event[0], -event[1])):
        while open_events and open_events[-1][0] <= start:
            open_events.pop()
        if open_events:
            own[open_events[-1][1]] -= duration
        # What waits is the executor, for thunks that run elsewhere.
        kind = "executor" if name.startswith("ThunkExecutor") else _kind(name)
        own[kind] += duration
        open_events.append((start + duration, kind))
    return own


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(name)), OTHER)
