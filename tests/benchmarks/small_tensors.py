"""What it costs to sum the gradients of small tensors apart, as spmdzero does, or as one tensor.

`python -m small_tensors '{"devices": ..., "repeats": ...}' out.json`
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs

import spmdzero
from spmdzero.backend.torch_xla import runtime

COUNT, ELEMENTS = 42, 400
WARM_UP = 3

Sum = Callable[[Sequence[torch.Tensor], xs.Mesh], list[torch.Tensor]]


def apart(partials: Sequence[torch.Tensor], mesh: xs.Mesh) -> list[torch.Tensor]:
    """An all-reduce for each."""
    return [_replicated(partial.sum(0), mesh) for partial in partials]


def together(partials: Sequence[torch.Tensor], mesh: xs.Mesh) -> list[torch.Tensor]:
    """One all-reduce of all."""
    total = _replicated(torch.cat(list(partials), dim=1).sum(0), mesh)
    return [_replicated(part * 1, mesh) for part in total.split(ELEMENTS)]


def measure(devices: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each repetition; both ways take turns."""
    spmdzero.init_distributed()
    mesh = xs.Mesh(np.arange(devices), (devices,), ("fsdp",))
    partials = []
    for index in range(COUNT):
        generator = torch.Generator().manual_seed(index)
        values = torch.randn(devices, ELEMENTS, generator=generator).to(torch_xla.device())
        xs.mark_sharding(values, mesh, ("fsdp", None))
        partials.append(values)
    torch_xla.sync()
    ways: dict[str, Sum] = {"apart": apart, "together": together}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARM_UP + repeats):
        for name, way in ways.items():
            sums = way(partials, mesh)
            runtime.wait()
            start = time.perf_counter()
            torch_xla.sync()
            runtime.wait()
            seconds[name].append(time.perf_counter() - start)
            del sums
    return {name: taken[WARM_UP:] for name, taken in seconds.items()}


def _replicated(tensor: torch.Tensor, mesh: xs.Mesh) -> torch.Tensor:
    xs.mark_sharding(tensor, mesh, (None,) * tensor.dim())
    return tensor


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(**json.loads(sys.argv[1]))))
