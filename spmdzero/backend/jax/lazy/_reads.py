"""Reads of a replica's tensors: Python gets the value that all replicas share, or an error."""

import torch
from torch.utils._python_dispatch import _disable_current_modes

from spmdzero._user_line import user_line
from spmdzero.backend._traced import traced
from spmdzero.backend.jax.lazy import _host
from spmdzero.backend.jax.lazy._dispatch import fetch, value_of
from spmdzero.backend.jax.lazy._tensor import LazyTensor, hooks
from spmdzero.backend.jax.lazy._values import Space
from spmdzero.backend.jax.mesh import DeviceMesh
from spmdzero.backend.replica import (
    common_value,
    current_reader,
    in_region,
    read_stacked,
    reads_are_global,
    shown_values,
    text_without_data,
    zeros_without_data,
)
from spmdzero.errors import ReplicaRegionError

_meshes: list[DeviceMesh] = []


def watch_reads(mesh: DeviceMesh) -> None:
    """Makes every read of a replica's tensor checked; `mesh` has all devices."""
    _meshes[:] = [mesh]
    _host.traffic.watch = _read


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of all replicas, None where `tensor` is global."""
    value = value_of(tensor)
    if value.stand_in and traced.zeros:
        return zeros_without_data(tensor)[None]
    _host.refuse_placeholder(value)
    if in_region():
        reader = current_reader()
        if reader is not None:
            return reader.values(tensor)
    if value.stand_in:
        raise ReplicaRegionError(
            f"{user_line()}: Python reads a value here of what is only traced. Use torch.where"
        )
    if value.space is not Space.REPLICA:
        return None
    with reads_are_global():
        return read_stacked(tensor, _meshes[0])


def _read(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value that all replicas share, on the CPU; None for a global tensor."""
    values = _values(tensor)
    if values is None:
        return None
    reader = current_reader()
    return common_value(values, reader.line if reader else user_line)


def _text(tensor: LazyTensor) -> str:
    """The `repr` of a tensor: a global one is read, of another every replica's value is shown."""
    with torch.no_grad(), _disable_current_modes():
        if value_of(tensor).stand_in and traced.only:
            return text_without_data(tensor)
        values = _values(tensor)
        if values is not None:
            return shown_values(tensor, values, repr)
        shown = repr(fetch(tensor))[:-1]
    grad = ", requires_grad=True" if tensor.requires_grad else ""
    text = f"{shown}, device={str(tensor.device)!r}{grad})"
    # The class of an engine's parameters says so itself.
    named = type(tensor).__repr__ is not LazyTensor.__repr__
    if isinstance(tensor, torch.nn.Parameter) and not named:
        return f"Parameter containing:\n{text}"
    return text


hooks.text = _text
