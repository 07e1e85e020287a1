"""A running engine's state in the common form of checkpoints, read from the devices in parts."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spmdzero.backend import arrays, runtime, store
from spmdzero.data._seeds import set_generators
from spmdzero.formats import (
    Box,
    StoredTensor,
    TrainingState,
    assemble,
    box_shape,
    box_slices,
    flat_boxes,
    whole_box,
)
from spmdzero.optim import zero_code
from spmdzero.plan import Layout
from spmdzero.state._host_state import host_state
from spmdzero.state._still_placed import require_placed
from spmdzero.state._training import Training

ACCUMULATOR = "accumulator/"


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor on the devices in its stored form.

    Attributes:
        stored: the stored tensor.
        shape: the shape of the tensor itself, without padding.
        layout: the layout of `stored`; None if every device holds the whole tensor.
        padding: the value of elements that `shape` doesn't have.
    """

    stored: torch.Tensor
    shape: tuple[int, ...]
    layout: Layout | None = None
    padding: int = 0

    @classmethod
    def of(cls, stored: torch.Tensor, layout: Layout, *, padding: int = 0) -> "Held":
        """A tensor that is stored as `layout` says."""
        # Each row of a partial is a tensor of its own.
        split = layout if layout.is_sharded or layout.kind == "partial" else None
        shape = layout.shape if layout.is_sharded else tuple(stored.shape)
        return cls(stored=stored, shape=shape, layout=split, padding=padding)


@torch.no_grad()
def live_state(
    training: Training,
    *,
    exclude_frozen: bool = False,
    client_state: Mapping[str, Any] | None = None,
) -> TrainingState:
    """The state from which an engine can continue exactly here.

    Reading a part moves it from the devices to the host, one tensor at a time; no device and no
    host puts a whole tensor together. The state is valid until the next step.

    Raises:
        SpmdZeroUsageError: gradients wait where they can't be saved, or the module was moved.
    """
    require_placed(training)
    if training.optimizer is not None:
        training.optimizer.renew()
    host = host_state(training, exclude_frozen=exclude_frozen, client_state=client_state or {})
    held = held_tensors(training)
    for name in host.excluded:
        held.pop(f"parameter/{name}")
    if host.accumulation is None:
        held = {name: item for name, item in held.items() if not name.startswith(ACCUMULATOR)}
    tensors = live_tensors(training, held, rng=host.rng or {})
    return TrainingState(tensors=tensors, host=host, source="the running engine")


def live_tensors(
    training: Training, held: Mapping[str, Held], *, rng: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Tensors on the devices, to be read in parts until the next step.

    Args:
        training: whose devices they are on.
        held: name -> tensor.
        rng: states of the generators, which are restored.
    """
    spread = _spread(training, held)
    runtime.sync()
    runtime.wait()
    # torch_xla's generator advances with each program; saving must not change it.
    set_generators(rng)
    latest = _Latest()
    return {
        name: _on_devices(name, item, latest, turn=turn)
        for turn, (name, item) in enumerate(spread.items())
    }


def held_tensors(training: Training) -> dict[str, Held]:
    """Name in a checkpoint -> tensor, for every tensor of a checkpoint."""
    held, left_out = dict[str, Held](), passing_buffers(training.module)
    for name, stored in training.named_tensors().items():
        role, _, own = name.partition("/")
        if role == "counter" or (role == "buffer" and own in left_out):
            continue
        padding = zero_code(role) if name in training.plan.in_eight_bits else 0
        held[name] = Held.of(stored, training.plan.at_rest(name), padding=padding)
    return held


def passing_buffers(module: torch.nn.Module) -> set[str]:
    """Names of the buffers that a state dict leaves out."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }


def _spread(training: Training, held: Mapping[str, Held]) -> dict[str, Held]:
    """Shards large tensors that every device holds whole, so that each sends only its part."""
    spread = {}
    for name, item in held.items():
        stored = item.stored
        if item.layout is None:
            layout = training.plan.in_parts(item.shape)
            if layout.is_sharded:
                stored = store(training.mesh, stored, layout)
                item = Held(stored=stored, shape=item.shape, layout=layout)
        spread[name] = item
    return spread


class _Latest:
    """Keeps the shards of the latest read tensor, which leave the devices all at once."""

    def __init__(self) -> None:
        self._name, self._shards = "", list[torch.Tensor]()

    def shards(self, name: str, stored: torch.Tensor) -> list[torch.Tensor]:
        if name != self._name:
            self._shards = []
            self._name, self._shards = name, arrays.local_shards(stored)
        return self._shards


def _on_devices(name: str, item: Held, latest: _Latest, *, turn: int) -> StoredTensor:
    dtype = item.stored.dtype
    if item.layout is None:
        mine = turn % runtime.process_count() == runtime.process_index()
        return StoredTensor(
            shape=item.shape,
            dtype=dtype,
            read=lambda box: item.stored.detach().cpu()[box_slices(box)].contiguous(),
            pieces=(whole_box(item.shape),) if mine else (),
            held=(whole_box(item.shape),),
        )
    local = arrays.local_slices(item.stored)
    parts = list(device_boxes(item.shape, item.layout, local))
    first = arrays.local_replicas(item.stored)
    return StoredTensor(
        shape=item.shape,
        dtype=dtype,
        read=lambda box: assemble(
            box, _held_pieces(latest.shards(name, item.stored), parts), dtype=dtype
        ),
        pieces=tuple(
            box for boxes, copy in zip(parts, first, strict=True) if not copy for box in boxes
        ),
        held=tuple(dict.fromkeys(box for boxes in parts for box in boxes)),
    )


def device_boxes(
    shape: tuple[int, ...], layout: Layout | None, local: list[tuple[slice, ...]]
) -> Iterator[tuple[Box, ...]]:
    """Yields the parts of a tensor that each local device holds, without padding.

    Args:
        shape: the tensor's shape.
        layout: the tensor's layout.
        local: slices of the stored form that each local device holds, from `local_slices`.
    """
    for slices in local:
        if layout is not None and layout.kind == "flat":
            (held,) = slices
            yield tuple(flat_boxes(shape, held.start, min(held.stop, math.prod(shape))))
        else:
            yield (tuple((part.start, part.stop) for part in slices),)


def _held_pieces(
    shards: list[torch.Tensor], parts: list[tuple[Box, ...]]
) -> Iterator[tuple[Box, torch.Tensor]]:
    # Along the data axis several devices hold the same part.
    for boxes, shard in dict(zip(parts, shards, strict=True)).items():
        start = 0
        for box in boxes:
            shape = box_shape(box)
            yield box, shard.reshape(-1)[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
