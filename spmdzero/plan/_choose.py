"""The choice of the dim along which one tensor's states are sharded."""

import dataclasses
import math

from spmdzero.plan._mesh import MeshSpec
from spmdzero.plan._placement import Placement, Shape

# A TPU keeps the last two dims in tiles of 8 x 128. A shard that cuts a tile makes the compiler
# fall back from reduce-scatter to all-reduce, as (24, 4096) over 8 devices does on dim 0.
_LAST_DIM_TILE = 128
_SECOND_LAST_DIM_TILE = 8


def choose_placement(shape: Shape, *, mesh: MeshSpec, min_shard_elements: int) -> Placement:
    """Where the states of a tensor of `shape` live: shard, flat, or replicate, with the reason.

    Among the dims that the number of shards divides, the first whose shard is a whole number of TPU
    tiles, and a multiple of 8, wins: a tensor gathered along its first dim is already in row-major
    order, along a later dim it is copied once more. The next choice is the longest dim whose shards
    are whole tiles, then the longest dim. A tensor without a dim to split is flattened and padded.
    Only scalars, empty tensors, tensors below `min_shard_elements`, and everything when one device
    has all shards, are replicated.
    """
    elements, devices = math.prod(shape), mesh.shards
    if not shape:
        return Placement(kind="replicate", reason="a scalar can't be split")
    if elements == 0:
        return Placement(kind="replicate", reason="no elements")
    if devices == 1:
        return Placement(kind="replicate", reason="one device on the fsdp axis")
    if elements < min_shard_elements:
        reason = f"{elements:,} elements < min_shard_elements {min_shard_elements:,}"
        return Placement(kind="replicate", reason=reason)

    divisible = [dim for dim, length in enumerate(shape) if length % devices == 0]
    if not divisible:
        return dataclasses.replace(_flat(shape, devices=devices), over=mesh.states)
    aligned = [dim for dim in divisible if shape[dim] // devices % _tile(dim, len(shape)) == 0]
    # A convolution's channels are its first dims, but a TPU keeps them in tiles: (16, 64, 3, 3)
    # over 8 devices is all-reduced on dim 0 (v5e:2x4). max() keeps the first of equals.
    roomy = [dim for dim in aligned if shape[dim] // devices % _SECOND_LAST_DIM_TILE == 0]
    dim = roomy[0] if roomy else max(aligned or divisible, key=lambda dim: shape[dim])
    split = f"dim {dim}: {shape[dim]:,} / {devices} = {shape[dim] // devices:,}"
    reason = f"{split}, {_why(dim, shape, bool(aligned))}"
    return Placement(kind="shard", dim=dim, reason=reason, over=mesh.states)


def _tile(dim: int, ndim: int) -> int:
    if dim == ndim - 1:
        return _LAST_DIM_TILE
    return _SECOND_LAST_DIM_TILE if dim == ndim - 2 else 1


def _why(dim: int, shape: Shape, aligned: bool) -> str:
    if not aligned:
        return "the longest dim that divides; none gives whole TPU tiles"
    tile = _tile(dim, len(shape))
    return "a leading dim, outside the TPU tile" if tile == 1 else f"whole TPU tiles of {tile}"


def _flat(shape: Shape, *, devices: int) -> Placement:
    elements = math.prod(shape)
    padded = math.ceil(elements / devices) * devices
    end = f"{elements:,} elements" if padded == elements else f"{elements:,} padded to {padded:,}"
    return Placement(kind="flat", reason=f"no dim divides by {devices}: flattened, {end}")
