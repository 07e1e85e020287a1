"""What of a captured step's host time is torch_xla's own, however little is done around it.

`python -m bare_replay '{"model": ..., "devices": ..., "steps": ...}' out.json`

The step's program is started by hand, in turns with `train_batch` and with one that traces: the
batch is uploaded, the program started on the buffers of the state, its results put in their place.
Nothing is checked or counted. "start" and "put" are parts of "bare".
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness.workload import Workload
from peers.config import deepspeed_config

import spmdzero
from spmdzero.backend.torch_xla import draw_keys, runtime
from spmdzero.engine._whole_step import host_numbers

WARM_UP = 5


def measure(model: str, devices: int, steps: int) -> dict[str, float]:
    """Milliseconds of the thread that launches, and how many tensors go in and come out."""
    workload = Workload(model=model, devices=devices, steps=steps)
    config = deepspeed_config(workload, stage=2)
    engine, *_ = spmdzero.initialize(model=workload.build(), config=config)
    tracing, *_ = spmdzero.initialize(
        model=workload.build(), config={**config, "spmd": {"capture": False}}
    )

    def train(batch: tuple[torch.Tensor, ...]) -> None:
        engine.train_batch(iter([batch]))

    def trace(batch: tuple[torch.Tensor, ...]) -> None:
        tracing.train_batch(iter([batch]))

    for step in range(WARM_UP):
        train(workload.batch(step))
        trace(workload.batch(step))
    (trust,) = engine.capture._following.kinds.values()
    record = trust.record
    assert record is not None, engine.capture.reason
    assert record.program is not None
    program = record.program
    hosts = [*host_numbers(engine._training, last=True), *draw_keys(record.traced.keys)]
    numbers = engine.mesh.place_all(hosts)

    names = ("traced", "captured", "bare", "start", "put")
    taken: dict[str, list[float]] = {name: [] for name in names}

    def bare(batch: tuple[torch.Tensor, ...]) -> None:
        inputs = [engine.mesh.place(x, engine.mesh.batch_spec(x.dim(), 0)) for x in batch]
        state = [place.holder[place.key] for place in record.reads]
        began = time.thread_time()
        *results, _ = program.run([*state, *inputs, *numbers])
        started = time.thread_time()
        for place, value in zip(record.writes, results, strict=True):
            place.put(value)
        taken["start"].append(started - began)
        taken["put"].append(time.thread_time() - started)

    ways: list[tuple[str, Callable[[tuple[torch.Tensor, ...]], None]]]
    ways = [("traced", trace), ("captured", train), ("bare", bare)]
    for step in range(2 + steps):
        for name, way in ways:
            batch = workload.batch(step)
            runtime.wait()
            began = time.thread_time()
            way(batch)
            taken[name].append(time.thread_time() - began)
    medians = {name: 1e3 * statistics.median(times[2:]) for name, times in taken.items()}
    return medians | {"inputs": len(program.inputs), "outputs": len(program.outputs)}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(**json.loads(sys.argv[1]))))
