"""The devices of a mesh, and the torus of their chips."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdzero.backend.chips._torus import Torus
from spmdzero.backend.jax._versions import is_for_tpu
from spmdzero.plan import batch_axes as batch_axes_of


def devices_by_host() -> list[jax.Device]:
    """All devices, host by host, in the order of the hosts' rows."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))


def batch_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The axes over which rows are split, and which the region divides; see `MeshSpec`."""
    return batch_axes_of(mesh.axis_names)


def replicas_of(mesh: jax.sharding.Mesh) -> int:
    """Number of data-parallel replicas."""
    return math.prod(mesh.shape[name] for name in batch_axes(mesh))


def within_sharing(
    function: Callable[[jax.Array], jax.Array], dims: Mapping[str, int | None]
) -> Callable[[jax.Array], jax.Array]:
    """A function of the region that exchanges over other axes, for what devices of a replica split.

    The compiler doesn't divide a call of an exchange: it would gather the operand over their axis.

    Args:
        function: of one device's part.
        dims: axis of `sharing_axes` -> the dim of operand and result that it splits, None for none;
            one axis at most splits one.
    """
    split = {axis: dim for axis, dim in dims.items() if dim is not None}
    if not split:
        return function
    ((axis, dim),) = split.items()
    spec = jax.sharding.PartitionSpec(*[None] * dim, axis)

    def divided(array: jax.Array) -> jax.Array:
        if not is_for_tpu():
            # XLA's CPU programs of such exchanges were seen to hang, in a loop at stage 3.
            return function(array)
        return over_sharing(function, [axis], in_specs=spec, out_specs=spec)(array)

    return divided


def sharing_axes(mesh: Any = None) -> tuple[str, ...]:
    """The axes by which devices share a replica, ``sequence`` and ``tensor``.

    Args:
        mesh: one of JAX's; None for that of the traced region, which leaves them to the compiler.
    """
    names = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).axis_names
    return tuple(name for name in names if name not in batch_axes_of(names))


def over_sharing(
    function: Callable[..., Any], axes: Sequence[str], *, in_specs: Any, out_specs: Any
) -> Any:
    """A function of the region whose part each device of a replica computes for itself.

    Args:
        function: of one device's parts.
        axes: of those that `sharing_axes` has.
        in_specs, out_specs: how the axes split operands and results, as of `jax.shard_map`.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=False,
    )


def _parts_of(ids: jax.Array) -> int:
    """Number of devices that have a part each of the positions of `[rows, length]`; 1 for none."""
    parts = jax.sharding.get_abstract_mesh().shape.get("sequence", 1)
    return 1 if ids.ndim != 2 or ids.shape[1] % parts else parts


def own_positions(ids: jax.Array) -> jax.Array:
    """Integers `[rows, length]` of which each device of the axis ``sequence`` has its positions.

    They are no slice: libtpu 0.0.21 aborts where it fuses a slice of them with other operations.
    """
    spec, parts = jax.sharding.PartitionSpec, _parts_of(ids)
    if parts == 1:
        return ids

    def own(ids: jax.Array, device: jax.Array) -> jax.Array:
        apart = ids.reshape(ids.shape[0], parts, -1)
        mine = jnp.arange(parts)[:, None] == device
        return jnp.where(mine, apart, 0).sum(1, dtype=ids.dtype)

    in_specs = spec(), spec("sequence")
    divided = over_sharing(own, ["sequence"], in_specs=in_specs, out_specs=spec(None, "sequence"))
    return divided(ids, jnp.arange(parts))


def by_positions(
    function: Callable[..., jax.Array], ids: jax.Array, array: jax.Array, *, summed: bool = False
) -> jax.Array:
    """Has each device of the axis ``sequence`` compute with its own positions' token ids.

    The compiler would gather what it can't divide. Without the axis `function` is called.

    Args:
        function: of ids and `array`.
        ids: `[rows, length]`.
        array: `[words, width]`, which each has whole, and the result is `[rows, length, width]`;
            or `[rows, length, width]`, of which it has a part, and the result is `summed`.
    """
    spec = jax.sharding.PartitionSpec
    if _parts_of(ids) == 1:
        return function(ids, array)
    positions = spec(None, "sequence")
    each = over_sharing(
        lambda *mine: function(*mine)[None] if summed else function(*mine),
        ["sequence"],
        in_specs=(positions, positions if summed else spec()),
        out_specs=spec("sequence") if summed else positions,
    )
    made = each(own_positions(ids), array)
    return made.sum(0) if summed else made


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
