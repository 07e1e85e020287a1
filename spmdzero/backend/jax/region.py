"""The replica region and the global forward, on JAX."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.backend.jax._around import JaxAround
from spmdzero.backend.jax._gathering import JaxGathering
from spmdzero.backend.jax._reads import watch_reads
from spmdzero.backend.jax._shared_rows import SharedRows
from spmdzero.backend.jax.mesh import DeviceMesh
from spmdzero.backend.jax.scan import Scan
from spmdzero.backend.protocols._region import (
    AttentionChoice,
    GradientSink,
    PartsOfGradients,
    Recompute,
    RegionRules,
    Wrote,
    ignore_writes,
)
from spmdzero.backend.replica import GatheredAtUse, GlobalForward, ReplicaRegion
from spmdzero.plan import Layout


def replica_region(
    *,
    mesh: DeviceMesh,
    module: nn.Module,
    sink: GradientSink,
    rules: RegionRules,
    seed: int = 1,
    autocast: torch.dtype | None = None,
    attention: AttentionChoice = "auto",
    scan: Scan = "off",
    recompute: Recompute = "nothing",
    keep_on_host: bool = False,
    wrote: Wrote = ignore_writes,
    layouts: Mapping[str, Layout] | None = None,
    parts: Callable[[], PartsOfGradients] | None = None,
) -> ReplicaRegion:
    """A `ReplicaRegion`; autocast to keep_on_host as in `JaxAround`."""
    watch_reads(mesh)
    around = JaxAround(
        module, autocast=autocast, attention=attention, scan=scan, recompute=recompute,
        keep_on_host=keep_on_host, rows=SharedRows(mesh) if mesh.spec.sequence > 1 else None,
    )  # fmt: skip
    gathered = None
    shards = {name: layout for name, layout in (layouts or {}).items() if layout.over_fsdp}
    if shards and parts:
        gathered = GatheredAtUse(mesh, shards, JaxGathering(mesh), parts, seed=seed)
    return ReplicaRegion(
        mesh=mesh, module=module, sink=sink, rules=rules, around=around, seed=seed, wrote=wrote,
        gathered=gathered, layouts=layouts or {},
    )  # fmt: skip


def global_forward(
    *, mesh: DeviceMesh, module: nn.Module, wrote: Wrote = ignore_writes, **around: Any
) -> GlobalForward:
    """A `GlobalForward`; autocast, attention and keep_on_host as in `JaxAround`."""
    watch_reads(mesh)
    made = JaxAround(module, mark=mesh.whole, **around)
    return GlobalForward(mesh=mesh, module=module, around=made, wrote=wrote)
