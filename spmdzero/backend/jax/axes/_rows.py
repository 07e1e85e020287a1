"""Rows that the devices of a replica share over the mesh axis ``sequence``.

The compiler divides what is computed of such rows. It is told where they are split by positions.
"""

from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from spmdzero.backend.jax._versions import context_mesh
from spmdzero.backend.jax.graph._graph import Slot, Step


def divided(array: jax.Array, dim: int, mesh: jax.sharding.Mesh) -> jax.Array:
    """A traced array of the region, of which each device of a replica has a part of `dim`."""
    axes: list[Any] = [PartitionSpec.UNCONSTRAINED] * array.ndim
    axes[dim] = "sequence"
    sharding = NamedSharding(context_mesh(mesh), PartitionSpec(*axes))
    return jax.lax.with_sharding_constraint(array, sharding)


def cut_later(
    step: Step, slots: Sequence[Slot], known: dict[int, Any], mesh: jax.sharding.Mesh
) -> None:
    """Has each device of a replica compute whole in `known` what `step` makes of integers alone.

    The compiler would rather cut the integers, such as position ids before they become angles:
    libtpu 0.0.21 aborts where it fuses a slice of numbers of 64 bits.

    Args:
        step: an operation.
        slots: its operands.
        known: number of a slot -> array, of operands and results.
        mesh: the devices; without an axis ``sequence`` nothing is done.
    """
    if mesh.shape.get("sequence", 1) == 1 or {slot.dtype for slot in slots} != {torch.int64}:
        return
    for made in step.made:
        if made.dtype != torch.int64 and made.shape:
            # Rows stay where they are: in global space replicas have some each.
            rows = [PartitionSpec.UNCONSTRAINED] if len(made.shape) > 1 else []
            sharding = NamedSharding(context_mesh(mesh), PartitionSpec(*rows))
            known[made.number] = jax.lax.with_sharding_constraint(known[made.number], sharding)


class Embedded:
    """The rows of one phase, where they become activations `[rows, length, width]`.

    Token ids, masks and labels stay whole on each device: they are small, and a mask of all pairs
    of positions is computed of them, which would have to be gathered.

    Args:
        mesh: the devices; without an axis ``sequence`` nothing is divided.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._mesh, self._parts = mesh, mesh.shape.get("sequence", 1)
        # Rows and lengths of what has entered.
        self._known = set[tuple[int, ...]]()

    def enter(self, step: Step, array: jax.Array) -> jax.Array:
        """Enters the region by `step`."""
        made = step.made[0]
        if self._parts == 1 or not step.op.spec or step.op.spec[0] is None or array.ndim < 2:
            return array
        self._known.add(tuple(made.shape[:2]))
        floating = array.ndim > 2 and made.dtype.is_floating_point
        return self._divided(made, array) if floating else array

    def make(self, step: Step, known: dict[int, Any]) -> None:
        """Divides in `known` what `step` has made of token ids."""
        if self._parts > 1 and step.op.key == "aten.embedding.default":
            made = step.made[0]
            lengths = {length for _, length in self._known}
            if len(made.shape) == 3 and made.shape[1] in lengths:
                known[made.number] = self._divided(made, known[made.number])

    def _divided(self, slot: Slot, array: jax.Array) -> jax.Array:
        return array if slot.shape[1] % self._parts else divided(array, 1, self._mesh)
