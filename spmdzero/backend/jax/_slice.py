"""The devices of a mesh, and the torus of their chips."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from spmdzero.backend.chips._torus import Torus
from spmdzero.backend.jax._versions import is_for_tpu


def devices_by_host() -> list[jax.Device]:
    """All devices, host by host, in the order of the hosts' rows."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def batch_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The axes over which rows are split, and which the region divides; see `MeshSpec`."""
    return tuple(name for name in mesh.axis_names if name != "tensor")


def replicas_of(mesh: jax.sharding.Mesh) -> int:
    """Number of data-parallel replicas."""
    return math.prod(mesh.shape[name] for name in batch_axes(mesh))


def within_tensor(
    function: Callable[[jax.Array], jax.Array], tensor_dim: int | None
) -> Callable[[jax.Array], jax.Array]:
    """A function of the region that exchanges over other axes, for what ``tensor`` splits.

    The compiler doesn't divide a call of an exchange: it would gather the operand over ``tensor``.

    Args:
        function: of one device's part.
        tensor_dim: the dim of operand and result that is split over ``tensor``; None for none.
    """
    if tensor_dim is None:
        return function
    spec = jax.sharding.PartitionSpec(*[None] * tensor_dim, "tensor")

    def divided(array: jax.Array) -> jax.Array:
        if not is_for_tpu():
            # XLA's CPU programs of such exchanges were seen to hang, in a loop at stage 3.
            return function(array)
        return over_tensor(function, in_specs=spec, out_specs=spec)(array)

    return divided


def over_tensor(function: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Any:
    """A function of the region whose part each device of the axis ``tensor`` computes for itself.

    Args:
        function: of one device's parts.
        in_specs, out_specs: how the axis splits operands and results, as of `jax.shard_map`.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={"tensor"},
        check_vma=False,
    )


def torus_of(devices: Sequence[Any]) -> Torus | None:
    """Number of chips along each direction of JAX's devices, x first; a device is a chip.

    The devices need not be numbered along x: libtpu was seen to scatter over groups of a
    direction's length in the order of hosts too (0.0.21 on v5e:4x4 and v5p:4x4x4), unless one group
    is all.

    Returns None where they don't fill one slice.
    """
    if not all(hasattr(device, "coords") for device in devices):
        return None
    coords = {tuple(device.coords) for device in devices}
    slices = {getattr(device, "slice_index", 0) for device in devices}
    torus = tuple(1 + max(place) for place in zip(*coords, strict=True))
    return torus if len(slices) == 1 and math.prod(torus) == len(coords) == len(devices) else None
