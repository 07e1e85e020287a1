"""Between the host's memory and the devices: uploads, reads, and who wants to know of them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental.multihost_utils import process_allgather

from spmdzero.backend._traced import traced
from spmdzero.backend._uploads import are_the_same
from spmdzero.backend.hosts._watching import waiting
from spmdzero.backend.jax import _own
from spmdzero.backend.jax._cells import pending_values
from spmdzero.backend.jax._execute import start
from spmdzero.backend.jax._generator import generator
from spmdzero.backend.jax._memory import on_devices
from spmdzero.backend.jax._values import Space, Value
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.replica import in_region, refuse_read_without_data
from spmdzero.errors import SpmdZeroRuntimeError

# torch dtypes that numpy doesn't know, by the integers of their size.
_BITS = {torch.bfloat16: torch.int16}
for _name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
    _BITS[getattr(torch, _name)] = torch.int8


class Traffic:
    """What has crossed between host and devices.

    Attributes:
        reads: transfers to the host so far.
        uploads: who takes down uploads.
        watch: what answers a read of what belongs to a replica, None for others.
        place: uploads a numpy array to every device whole.
        place_own: uploads a numpy array of which each host has another; None with one process.
    """

    def __init__(self) -> None:
        self.reads = 0
        self.uploads: list[set[int]] = []
        self.watch: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None
        self.place: Callable[[np.ndarray], jax.Array] | None = None
        self.place_own: Callable[[np.ndarray], jax.Array] | None = None


traffic = Traffic()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a CPU tensor; dtypes that numpy lacks are those of ml_dtypes."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _BITS:
        bits = tensor.view(_BITS[tensor.dtype]).numpy()
        return bits.view(np.dtype(str(tensor.dtype).removeprefix("torch."))).copy()
    return tensor.numpy().copy()


def to_torch(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of its own memory."""
    if dtype in _BITS:
        bits = array.view(np.int16 if _BITS[dtype] == torch.int16 else np.int8)
        return torch.from_numpy(bits.copy()).view(dtype)
    return torch.from_numpy(np.array(array))


def constant(tensor: torch.Tensor) -> Value:
    """The value of a CPU tensor, uploaded to every device whole."""
    value = _uploaded(tensor)
    note_upload(value)
    return value


def moved(tensor: torch.Tensor) -> Value:
    """The value of a CPU tensor that a script moves to the devices: of several hosts, its own.

    What a module moves is the same on all, as it is traced once for all replicas.
    """
    if traffic.place_own is None or traffic.uploads or in_region() or are_the_same():
        return constant(tensor)
    return own(tensor)


def own(tensor: torch.Tensor) -> Value:
    """The value of a CPU tensor of which each host has another."""
    assert traffic.place_own is not None
    array = traffic.place_own(to_numpy(tensor))
    value = Value(tensor.shape, tensor.dtype, Space.HOST, array=array)
    value.uploaded = True
    return value


def seed(number: int) -> Value:
    """A seed of the devices' own generator on every device, which no later step has again."""
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
    """Takes note of an upload, if somebody asked for it."""
    for uploads in traffic.uploads:
        uploads.add(value.serial)


def fetched(value: Value) -> torch.Tensor:
    """A global value, or this host's part of one that each has for itself, in its memory.

    Raises:
        ReplicaRegionError: it is of a placeholder.
    """
    refuse_placeholder(value)
    compute(value)
    traffic.reads += 1
    with wide_numbers():
        if value.space is Space.HOST:
            return to_torch(_own.part_of(value.array, value.shape), value.dtype)
        return to_torch(gathered(value.array), value.dtype)


def refuse_placeholder(value: Value) -> None:
    """Raises ReplicaRegionError for what is computed from a placeholder, which has no data."""
    if value.stand_in and traced.only:
        refuse_read_without_data()


def compute(value: Value) -> None:
    """Has the devices compute a value, and what else waits for the same operations."""
    if value.node is None:
        return
    if not traffic.uploads:
        start([*pending_values(), value])
        generator.advance()
        return
    # What is being traced stays pending, or it would be no part of the program.
    leaves = start([value], donate=False)
    for uploads in traffic.uploads:
        if all(leaf.serial in uploads for leaf in leaves):
            uploads.add(value.serial)


def gathered(array: Any) -> np.ndarray:
    """The whole array in the memory of this host; of what hosts hold in parts, all have to ask."""
    with waiting():
        if array.is_fully_addressable or array.is_fully_replicated:
            return np.asarray(array)
        return np.asarray(process_allgather(on_devices(array), tiled=True))
