"""The replica region and the global forward, on torch_xla."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.backend.protocols._region import (
    GradientSink,
    PartsOfGradients,
    Recompute,
    RegionRules,
    Wrote,
    ignore_writes,
)
from spmdzero.backend.replica import GatheredAtUse, GlobalForward, ReplicaRegion
from spmdzero.backend.torch_xla._around import TorchXlaAround
from spmdzero.backend.torch_xla._gathering import XlaGathering
from spmdzero.backend.torch_xla._reads import watch_reads
from spmdzero.backend.torch_xla.mesh import DeviceMesh
from spmdzero.plan import Layout


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
