"""Batched products whose one batch dim torch has made of two, as of rows and heads.

torch reshapes `[rows, heads, a, b]` to `[rows * heads, a, b]` before each product of more than
three dims. Heads that the mesh axis ``tensor`` splits have no shards then: XLA would gather them.
"""

from collections.abc import Container
from typing import Any

import jax.numpy as jnp

from spmdzero.backend.jax._graph import Slot, Step
from spmdzero.backend.jax.ops.matmul import product

_RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_COPIES = (("identity",), "aten.clone.default", "aten.alias.default", "aten.detach.default")


class TwoBatchDims:
    """The arrays of a graph's region with two batch dims where torch has one, for `aten::bmm`.

    Args:
        outputs: numbers of the slots that leave the program, in torch's form.
    """

    def __init__(self, outputs: Container[int]) -> None:
        self._outputs = outputs
        # Number of a slot of three dims -> its array with four, in the present phase.
        self._apart: dict[int, Any] = {}
        self._kept = set[int]()

    def leave(self, number: int, array: Any) -> Any:
        """The form in which a value of one phase is kept for later ones."""
        if number not in self._apart or number in self._outputs:
            return array
        self._kept.add(number)
        return self._apart[number]

    def enter(self, slot: Slot, array: Any) -> Any:
        """The value of a slot in torch's form, from what `leave` returned."""
        if slot.number not in self._kept:
            return array
        self._apart[slot.number] = array
        return array.reshape(slot.shape)

    def end(self) -> None:
        """Ends a phase, whose arrays no later one may use."""
        self._apart = {}

    def computes(self, step: Step, slots: list[Slot], known: dict[int, Any]) -> bool:
        """Whether it has added the result of `step`, such a product or a reshape, to `known`.

        Args:
            step: an operation of the region.
            slots: its operands.
            known: number of a slot -> array, of all operands.
        """
        if not slots or len(step.made) != 1:
            return False
        key, made = step.op.key, step.made[0]
        apart = [self._apart.get(slot.number) for slot in slots]
        first = apart[0]
        if key in _RESHAPES:
            before = slots[0].shape
            if first is not None and first.shape == made.shape:
                known[made.number] = first
                return True
            if len(before) == 4 and made.shape == (before[0] * before[1], *before[2:]):
                self._apart[made.number] = known[slots[0].number]
        elif first is None:
            return False
        elif key == "aten.transpose.int" and {dim % 3 for dim in step.args[1:]} == {1, 2}:
            self._apart[made.number] = jnp.swapaxes(first, 2, 3)
        elif key in _COPIES:
            self._apart[made.number] = first
        elif key == "aten.bmm.default" and len(apart) == 2 and apart[1] is not None:
            second = apart[1]
            if first.shape[:2] == second.shape[:2]:
                multiplied = product(first, second, ((3,), (2,)), ((0, 1), (0, 1)))
                self._apart[made.number] = multiplied.astype(first.dtype)
                known[made.number] = self._apart[made.number].reshape(made.shape)
                return True
        return False
