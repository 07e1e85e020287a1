"""Reduce-scatters that a compiler refused, and how to restore them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from spmdzero._names import covered
from spmdzero.explain._chips import Topology
from spmdzero.inspect import Collective
from spmdzero.plan import Role, ShardingPlan, TensorPlan

# A register tile of the TPU: rows on the dim before the last, columns on the last.
_TILE = {-2: 8, -1: 128}
_FLAGS = (
    "xla_tpu_use_minor_sharding_for_major_trivial_input=true and "
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1"
)


@dataclass(frozen=True, kw_only=True)
class RefusedScatter:
    """A gradient that the plan shards and the compiler reduced whole, then sliced.

    Attributes:
        tensor: the parameter's name.
        bytes: size of the whole gradient on the wire.
        reason: the likely reason, from topology, tile and size.
        fix: how to restore the reduce-scatter, or why that is not needed.
    """

    tensor: str
    bytes: int
    reason: str
    fix: str


def refused_scatters(
    plan: ShardingPlan, collectives: Iterable[Collective], *, topology: Topology | None
) -> tuple[RefusedScatter, ...]:
    """The gradients of `plan` that should have been reduce-scattered and were not.

    Args:
        plan: the sharding plan.
        collectives: collectives of all programs of a step.
        topology: the chips; None for XLA's CPU compiler.
    """
    gradients = [c for c in collectives if c.role == "gradient"]
    # Over slices libtpu scatters within each, and gathers the sum there again.
    whole = {c.tensor for c in gradients if c.kind == "all-gather"}
    scattered = {c.tensor for c in gradients if c.kind == "reduce-scatter"} - whole
    refused: dict[str, RefusedScatter] = {}
    for c in gradients:
        name = covered(c.tensor, plan.names)
        if c.tensor in scattered or name is None:
            continue
        tensor = plan[name]
        placement = tensor.placement(Role.GRADIENT)
        if placement is None or placement.kind == "replicate":
            continue
        reason, fix = _why(plan, tensor, topology=topology, any_scattered=bool(scattered))
        refused[c.tensor] = RefusedScatter(tensor=c.tensor, bytes=c.bytes, reason=reason, fix=fix)
    return tuple(refused.values())


def _why(
    plan: ShardingPlan, tensor: TensorPlan, *, topology: Topology | None, any_scattered: bool
) -> tuple[str, str]:
    if topology is None:
        return (
            "XLA's CPU compiler has no pass that makes one from an annotation",
            "nothing to do: compile for TPU to see what becomes of it",
        )
    if not any_scattered and not topology.scatters_whole:
        data = min(topology.shape)
        fix = (
            '"spmd": {"reduction": "auto", "forward": "region"} scatters over one direction of the '
            "slice after another"
            if topology.slices == 1
            else f'"spmd": {{"mesh": {{"data": {data}, "fsdp": -1}}}}: two axes scatter over fsdp'
        )
        return (
            f"one mesh axis spans all of {topology.name}, where libtpu prefers its N-D all-reduce",
            fix,
        )
    if topology.slices > 1 and not any_scattered:
        group = topology.devices // topology.slices
        return (
            "one mesh axis spans the slices: libtpu sums it whole in each of them",
            f'"zero_optimization": {{"zero_hpz_partition_size": {group}}} gathers and scatters '
            "within a slice"
            if plan.stage == 3
            else f'"spmd": {{"mesh": {{"data": {topology.slices}, "fsdp": -1}}}} scatters within a '
            "slice",
        )
    if len(tensor.shape) == 1:
        return (
            "libtpu combines the gradients of vectors into one all-reduce",
            f'little to gain; "spmd": {{"min_shard_elements": {math.prod(tensor.shape) + 1}}} '
            "keeps its states whole and saves its gather",
        )
    if off := _off_tile(plan, tensor):
        return off, "another width, or states kept whole: raise spmd.min_shard_elements"
    return (
        "libtpu combined it into an all-reduce with other tensors, as it does with small ones",
        f'the XLA flags that "spmd": {{"xla_flags": "auto"}} sets: {_FLAGS}',
    )


def _off_tile(plan: ShardingPlan, tensor: TensorPlan) -> str:
    placement = tensor.placement(Role.GRADIENT)
    assert placement is not None
    if placement.kind != "shard" or placement.dim is None:
        return ""
    dim = placement.dim - len(tensor.shape)
    local = placement.local_shape(tensor.shape, plan.mesh)[placement.dim]
    tile = _TILE.get(dim, 1)
    if local % tile == 0:
        return ""
    return f"its shard has {local} entries on dim {placement.dim}, no multiple of the tile's {tile}"
