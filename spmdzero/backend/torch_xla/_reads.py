"""Reads of what belongs to a replica: Python gets the value that all replicas have, or an error.

XLA aborts the process when such a tensor is moved to the host. `RegionDispatch` sees most reads;
not those that torch makes with modes off (`repr`), and not those of a hook that keeps a tensor and
reads it after the region, or that runs in a plain `loss.backward()`. So torch_xla's ways to the
host are watched in the dispatcher itself, which also spares a split tensor the program that
torch_xla would compile to gather it.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from spmdzero._user_line import user_line
from spmdzero.backend.torch_xla import _manual, _private, runtime
from spmdzero.backend.torch_xla.arrays import local_shards
from spmdzero.backend.torch_xla.kernels import watch_copies_to_host
from spmdzero.backend.torch_xla.mesh import DeviceMesh
from spmdzero.errors import ReplicaRegionError

# Replicas whose values `repr` shows.
_SHOWN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """How a region reads.

    Attributes:
        values: `[*shape]` in replica space -> those of all replicas, `[n, *shape]` on the CPU.
        line: names the user's line and module.
    """

    values: Callable[[torch.Tensor], torch.Tensor]
    line: Callable[[], str]


class _Thread(threading.local):
    def __init__(self) -> None:
        # One for each region that this thread is in; None while spmdzero itself reads.
        self.readers: list[Reader | None] = []


_thread = _Thread()
_meshes: list[DeviceMesh] = []


def watch_reads(mesh: DeviceMesh) -> None:
    """Has every read of a replica's tensor checked from now on; `mesh` has all devices."""
    if not _meshes:
        watch_copies_to_host(_read)
        _private.watch_text(shown)
    _meshes[:] = [mesh]


@contextlib.contextmanager
def reads_by(reader: Reader | None) -> Iterator[None]:
    """Inside, reads of this thread are the reader's."""
    _thread.readers.append(reader)
    try:
        yield
    finally:
        _thread.readers.pop()


def reads_are_global() -> contextlib.AbstractContextManager[None]:
    """Inside, what is read belongs to no replica."""
    return reads_by(None)


def in_region() -> bool:
    """Whether this thread runs what belongs to a replica."""
    return bool(_thread.readers)


def common_value(values: torch.Tensor, line: Callable[[], str]) -> torch.Tensor:
    """The value that all replicas have, `[*shape]`.

    Args:
        values: of all replicas, `[n, *shape]` on the CPU.
        line: says where Python reads it.

    Raises:
        ReplicaRegionError: the replicas disagree.
    """
    first = values[0]
    if not _agree(values):
        shown_values = ", ".join(map(str, values.reshape(len(values), -1)[:, 0].tolist()))
        raise ReplicaRegionError(
            f"{line()}: Python reads a value here, and the replicas disagree on it "
            f"({shown_values}). Each replica runs the same traced program on its own rows, so "
            "Python can't branch on one replica's data. Use torch.where, or move the decision out "
            "of the module; print(tensor) shows what each replica has"
        )
    return first


def shown(tensor: torch.Tensor, plain: Callable[[torch.Tensor], str]) -> str | None:
    """What `print` shows of a tensor on which the replicas may disagree, None for a global one.

    Args:
        tensor: on the devices.
        plain: a tensor on the CPU -> its `repr`.
    """
    with torch.no_grad(), _disable_current_modes():
        if _lacks_data(tensor):
            return (
                f"tensor without data (shape={list(tensor.shape)}, dtype={tensor.dtype}, "
                f"device={str(tensor.device)!r})"
            )
        values = _values(tensor)
    if values is None:
        return None
    suffix = f"device={str(tensor.device)!r}"
    if tensor.requires_grad:
        suffix += ", requires_grad=True"
    if _agree(values):
        return f"{plain(values[0])[:-1]}, {suffix})"
    lines = [f"replica {i}: {plain(value)}" for i, value in enumerate(values[:_SHOWN])]
    if len(values) > _SHOWN:
        lines.append(f"... and {len(values) - _SHOWN} more")
    body = "".join("\n  " + line.replace("\n", "\n  ") for line in lines)
    return (
        f"tensor of {len(values)} replicas, another on each (shape={list(tensor.shape)}, "
        f"dtype={tensor.dtype}, {suffix}):{body}"
    )


def _agree(values: torch.Tensor) -> bool:
    first = values[0]
    # NaN agrees with NaN.
    return bool(((values == first) | ((values != values) & (first != first))).all())


def _lacks_data(tensor: torch.Tensor) -> bool:
    # XLA ends the process when it is to read one.
    return runtime.is_tracing_only() and _private.lacks_data(tensor)


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of all replicas, None where `tensor` is global."""
    if _lacks_data(tensor):
        raise ReplicaRegionError(
            f"{user_line()}: Python reads a value here, and a model on the meta device is "
            "explained without any. Use torch.where, or explain a smaller model with data"
        )
    if _thread.readers:
        reader = _thread.readers[-1]
        return reader.values(tensor) if reader is not None else None
    # Only what was computed tells. Whoever reads has it computed in any case.
    _private.compute(tensor)
    if not _private.is_manual(tensor):
        return None
    with reads_are_global():
        return _manual.read_stacked(tensor, _meshes[0])


def _read(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor that Python reads, on the CPU; None where torch_xla reads it well."""
    values = _values(tensor)
    if values is None:
        return _together(tensor)
    reader = _thread.readers[-1] if _thread.readers else None
    return common_value(values, reader.line if reader else user_line)


def _together(tensor: torch.Tensor) -> torch.Tensor | None:
    """A split tensor from what each device holds; None for another, or one of several hosts.

    torch_xla compiles a program that gathers it, a new one at each read.
    """
    if runtime.process_count() > 1:
        return None
    _private.compute(tensor)
    if not _private.is_split(tensor):
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for part, slices in zip(local_shards(tensor), _private.local_slices(tensor), strict=True):
        whole[slices] = part[tuple(slice(dim.stop - dim.start) for dim in slices)]
    return whole
