"""The replica region and the global forward, on torch_xla.

XLA aborts the process when a replica's tensor is moved to the host. `RegionDispatch` sees most
reads, but not those that torch makes with modes off (`repr`), and not those of a hook that reads a
kept tensor after the region, or in a plain `loss.backward()`. So torch_xla's ways to the host are
watched in the dispatcher itself. This also avoids the program that torch_xla would compile to
gather a split tensor.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from spmdzero._user_line import user_line
from spmdzero.backend.protocols._region import (
    GradientSink,
    PartsOfGradients,
    Recompute,
    RegionRules,
    Wrote,
    ignore_writes,
)
from spmdzero.backend.replica import (
    GatheredAtUse,
    GlobalForward,
    ReplicaRegion,
    common_value,
    current_reader,
    in_region,
    read_stacked,
    reads_are_global,
    shown_values,
)
from spmdzero.backend.torch_xla import _private, runtime
from spmdzero.backend.torch_xla._around import TorchXlaAround
from spmdzero.backend.torch_xla._gathering import XlaGathering
from spmdzero.backend.torch_xla.arrays import local_shards
from spmdzero.backend.torch_xla.kernels import watch_copies_to_host
from spmdzero.backend.torch_xla.mesh import DeviceMesh
from spmdzero.plan import Layout

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


def replica_region(
    *,
    mesh: DeviceMesh,
    module: nn.Module,
    sink: GradientSink,
    rules: RegionRules,
    seed: int = 1,
    autocast: torch.dtype | None = None,
    recompute: Recompute = "nothing",
    keep_on_host: bool = False,
    wrote: Wrote = ignore_writes,
    layouts: Mapping[str, Layout] | None = None,
    parts: Callable[[], PartsOfGradients] | None = None,
) -> ReplicaRegion:
    """A `ReplicaRegion`; autocast to keep_on_host as in `TorchXlaAround`."""
    watch_reads(mesh)
    around = TorchXlaAround(
        module, autocast=autocast, recompute=recompute,
        keep_on_host=keep_on_host,
    )  # fmt: skip
    gathered = None
    if layouts and parts:
        gathered = GatheredAtUse(mesh, layouts, XlaGathering(mesh), parts, seed=seed)
    return ReplicaRegion(
        mesh=mesh, module=module, sink=sink, rules=rules, around=around, seed=seed, wrote=wrote,
        gathered=gathered, layouts=layouts or {},
    )  # fmt: skip


def global_forward(
    *, mesh: DeviceMesh, module: nn.Module, wrote: Wrote = ignore_writes, **around: Any
) -> GlobalForward:
    """A `GlobalForward`; autocast and keep_on_host as in `TorchXlaAround`."""
    watch_reads(mesh)
    made = TorchXlaAround(module, **around)
    return GlobalForward(mesh=mesh, module=module, around=made, wrote=wrote)
