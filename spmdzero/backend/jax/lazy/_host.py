"""Transfers between the host's memory and the devices, and records of them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental.multihost_utils import process_allgather

from spmdzero.backend._traced import traced
from spmdzero.backend._uploads import are_the_same
from spmdzero.backend.hosts._watching import waiting
from spmdzero.backend.jax._memory import on_devices
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax.graph._execute import start
from spmdzero.backend.jax.graph._graph import Graph
from spmdzero.backend.jax.hosts import _own
from spmdzero.backend.jax.lazy._cells import pending_values
from spmdzero.backend.jax.lazy._generator import generator
from spmdzero.backend.jax.lazy._values import Space, Value
from spmdzero.backend.replica import in_region, refuse_read_without_data
from spmdzero.errors import SpmdZeroRuntimeError

# torch dtypes that numpy doesn't know -> integers of the same size.
_BITS = {torch.bfloat16: torch.int16}
for _name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
    _BITS[getattr(torch, _name)] = torch.int8


class Traffic:
    """The state of transfers between host and devices.

    Attributes:
        reads: number of transfers to the host so far.
        uploads: sets that record uploads, one for each recording in force.
        watch: answers a read of a replica's tensor; returns None for other tensors.
        place: uploads a numpy array whole to every device.
        place_own: uploads a numpy array that differs from host to host; None with one process.
    """

    def __init__(self) -> None:
        self.reads = 0
        self.uploads: list[set[int]] = []
        self.watch: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None
        self.place: Callable[[np.ndarray], jax.Array] | None = None
        self.place_own: Callable[[np.ndarray], jax.Array] | None = None


traffic = Traffic()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a CPU tensor; numpy has its dtype from ml_dtypes where it lacks one."""
    if tensor.dtype in _BITS:
        bits = to_numpy(tensor.detach().resolve_neg().contiguous().view(_BITS[tensor.dtype]))
        return bits.view(np.dtype(str(tensor.dtype).removeprefix("torch.")))
    return tensor.numpy(force=True).copy()


def to_torch(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor with its own copy of the memory."""
    if dtype in _BITS:
        bits = array.view(np.int16 if _BITS[dtype] == torch.int16 else np.int8)
        return torch.from_numpy(bits.copy()).view(dtype)
    return torch.from_numpy(np.array(array))


def constant(tensor: torch.Tensor) -> Value:
    """The value of a CPU tensor, uploaded whole to every device."""
    value = _uploaded(tensor)
    note_upload(value)
    return value


def moved(tensor: torch.Tensor) -> Value:
    """The value of a CPU tensor that a script moves to the devices; with several hosts, its own.

    A tensor that a module moves is the same on all hosts, as it is traced once for all replicas.
    """
    if traffic.place_own is None or traffic.uploads or in_region() or are_the_same():
        return constant(tensor)
    return own(tensor)


def own(tensor: torch.Tensor) -> Value:
    """The value of a CPU tensor that differs from host to host."""
    assert traffic.place_own is not None
    array = traffic.place_own(to_numpy(tensor))
    value = Value(tensor.shape, tensor.dtype, Space.HOST, array=array)
    value.uploaded = True
    return value


def seed(number: int) -> Value:
    """The value of a seed on every device; no later step has the same."""
    return _uploaded(torch.tensor(number, dtype=torch.int32))


def _uploaded(tensor: torch.Tensor) -> Value:
    if traffic.place is None:
        raise SpmdZeroRuntimeError(
            "a tensor is made on xla:0 before there are devices: call spmdzero.initialize first"
        )
    value = Value(tensor.shape, tensor.dtype, Space.NEUTRAL, array=traffic.place(to_numpy(tensor)))
    value.uploaded = True
    return value


def note_upload(value: Value) -> None:
    """Records an upload, if recordings are in force."""
    for uploads in traffic.uploads:
        uploads.add(value.serial)


def fetched(value: Value) -> torch.Tensor:
    """A global value as a CPU tensor, or this host's part of a value that each host has.

    Raises:
        ReplicaRegionError: the value comes from a placeholder.
    """
    refuse_placeholder(value)
    compute(value)
    traffic.reads += 1
    with wide_numbers():
        if value.space is Space.HOST:
            return to_torch(_own.part_of(value.array, value.shape), value.dtype)
        return to_torch(gathered(value.array), value.dtype)


def refuse_placeholder(value: Value) -> None:
    """Raises ReplicaRegionError for a value computed from a placeholder, which has no data."""
    if value.stand_in and traced.only:
        refuse_read_without_data()


def compute(value: Value) -> None:
    """Computes a value on the devices, with all other pending values."""
    if value.node is None:
        return
    if not traffic.uploads:
        start([*pending_values(), value])
        generator.advance()
        return
    _, leaves = Graph.of([value])
    # Traced values stay pending, because they would otherwise be missing from the program.
    start([value], donate=False)
    for uploads in traffic.uploads:
        if all(leaf.serial in uploads for leaf in leaves):
            uploads.add(value.serial)


def gathered(array: Any) -> np.ndarray:
    """The whole array on this host; of an array in parts, all hosts have to call this."""
    with waiting():
        if array.is_fully_addressable or array.is_fully_replicated:
            return np.asarray(array)
        return np.asarray(process_allgather(on_devices(array), tiled=True))
