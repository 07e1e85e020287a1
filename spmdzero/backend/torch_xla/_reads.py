"""Reads of a replica's tensors: Python gets the value that all replicas share, or an error.

XLA aborts the process when such a tensor is moved to the host. `RegionDispatch` sees most reads,
but not those that torch makes with modes off (`repr`), and not those of a hook that reads a kept
tensor after the region, or in a plain `loss.backward()`. So torch_xla's ways to the host are
watched in the dispatcher itself. This also avoids the program that torch_xla would compile to
gather a split tensor.
"""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from spmdzero._user_line import user_line
from spmdzero.backend.replica import (
    common_value,
    current_reader,
    in_region,
    read_stacked,
    reads_are_global,
    shown_values,
)
from spmdzero.backend.torch_xla import _private, runtime
from spmdzero.backend.torch_xla.arrays import local_shards
from spmdzero.backend.torch_xla.kernels import watch_copies_to_host
from spmdzero.backend.torch_xla.mesh import DeviceMesh

_meshes: list[DeviceMesh] = []


def watch_reads(mesh: DeviceMesh) -> None:
    """Makes every read of a replica's tensor checked; `mesh` has all devices."""
    if not _meshes:
        watch_copies_to_host(_read)
        _private.watch_text(shown)
    _meshes[:] = [mesh]


def shown(tensor: torch.Tensor, plain: Callable[[torch.Tensor], str]) -> str | None:
    """The text that `print` shows where replicas may disagree; None for a global tensor.

    Args:
        tensor: on the devices.
        plain: returns the `repr` of a CPU tensor.
    """
    with torch.no_grad(), _disable_current_modes():
        values = _values(tensor)
    if values is None:
        return None
    return shown_values(tensor, values, plain)


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of all replicas, None where `tensor` is global."""
    if in_region():
        reader = current_reader()
        return reader.values(tensor) if reader is not None else None
    # Only a computed tensor shows what it is. The reader needs it computed in any case.
    _private.compute(tensor)
    if not _private.is_manual(tensor):
        return None
    with reads_are_global():
        return read_stacked(tensor, _meshes[0])


def _read(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor that Python reads, on the CPU; None where torch_xla reads it well."""
    values = _values(tensor)
    if values is None:
        return _together(tensor)
    reader = current_reader()
    return common_value(values, reader.line if reader else user_line)


def _together(tensor: torch.Tensor) -> torch.Tensor | None:
    """A split tensor joined from its shards; None if it isn't split, or with several hosts.

    torch_xla would compile a program that gathers it, a new one at each read.
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
