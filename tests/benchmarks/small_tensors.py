"""What it costs to sum the gradients of small tensors apart, as spmdzero does, or as one tensor."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from harness.turns import Way, take_turns

import spmdzero

COUNT, ELEMENTS = 42, 400

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

    def summed(way: Sum) -> Way:
        def prepare(_: int) -> Callable[[], object]:
            sums = way(partials, mesh)
            # Holds the sums until they are computed.
            return lambda: (torch_xla.sync(), sums)

        return prepare

    taken = take_turns(
        {"apart": summed(apart), "together": summed(together)}, turns=repeats, warm_up=3
    )
    return {name: seconds.whole for name, seconds in taken.items()}


def _replicated(tensor: torch.Tensor, mesh: xs.Mesh) -> torch.Tensor:
    xs.mark_sharding(tensor, mesh, (None,) * tensor.dim())
    return tensor
