"""What of a captured step's host time is torch_xla's own, however little is done around it.

The step's program is started by hand, in turns with `train_batch` and with one that traces: the
batch is uploaded, the program started on the buffers of the state, its results put in their place.
Nothing is checked or counted. "start" and "put" are parts of "bare".
"""

import statistics
import time
from collections.abc import Callable

import torch
from harness.turns import Way, take_turns
from harness.workload import Workload
from peers.config import deepspeed_config
from spmdzero.engine._whole_step import host_numbers

import spmdzero
from spmdzero.backend import arrays, draw_keys

WARM_UP = 5
Batch = tuple[torch.Tensor, ...]


def measure(model: str, devices: int, steps: int) -> dict[str, float]:
    """Milliseconds of the thread that launches, and how many tensors go in and come out."""
    workload = Workload(model=model, devices=devices, steps=steps)

    def engine_of(**spmd: bool) -> spmdzero.Engine:
        config = deepspeed_config(workload, stage=2) | {"spmd": spmd}
        return spmdzero.initialize(model=workload.build(), config=config)[0]

    engine, tracing = engine_of(), engine_of(capture=False)
    for step in range(WARM_UP):
        for each in (engine, tracing):
            each.train_batch(iter([workload.batch(step)]))
    (trust,) = engine.capture._kinds.kinds.values()
    record = trust.record
    assert record is not None, engine.capture.reason
    assert record.program is not None
    program = record.program
    hosts = [*host_numbers(engine._training, last=True), *draw_keys(record.traced.keys)]
    numbers = engine.mesh.place_all(hosts)
    start: list[float] = []
    putting: list[float] = []

    def bare(batch: Batch) -> None:
        inputs = [engine.mesh.place(x, engine.mesh.batch_spec(x.dim(), 0)) for x in batch]
        state = record.state()
        began = time.thread_time()
        *results, _ = program.run([*state, *inputs, *numbers], [None] * (len(record.writes) + 1))
        started = time.thread_time()
        for place, value in zip(record.writes, results, strict=True):
            if place.replaced:
                place.registry[place.key] = value
            else:
                arrays.set_value(place.registry[place.key], value)
        start.append(started - began)
        putting.append(time.thread_time() - started)

    def on_batches(act: Callable[[Batch], object]) -> Way:
        def prepare(turn: int) -> Callable[[], object]:
            batch = workload.batch(turn)
            return lambda: act(batch)

        return prepare

    ways = {
        "traced": on_batches(lambda batch: tracing.train_batch(iter([batch]))),
        "captured": on_batches(lambda batch: engine.train_batch(iter([batch]))),
        "bare": on_batches(bare),
    }
    taken = take_turns(ways, turns=steps, warm_up=2)
    host = {name: seconds.host for name, seconds in taken.items()}
    host |= {"start": start[2:], "put": putting[2:]}
    medians = {name: 1e3 * statistics.median(times) for name, times in host.items()}
    return medians | {"inputs": len(program.inputs), "outputs": len(program.outputs)}
