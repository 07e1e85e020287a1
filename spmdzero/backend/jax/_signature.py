"""Tells whether what is recorded was recorded before, without making a graph of it."""

from collections.abc import Hashable
from typing import Any

from spmdzero.backend.forms._tree import form_of
from spmdzero.backend.jax._graph import Folded, in_order
from spmdzero.backend.jax._values import Node, Value


class Signature:
    """Numbers values, each after those that it is computed from.

    Attributes:
        leaves: the values that are not computed, by their numbers' order.
        steps: what makes each value. They are equal for recordings that compute the same from other
            leaves of the same forms.
    """

    def __init__(self) -> None:
        self.leaves: list[Value] = []
        self.steps: list[Hashable] = []
        self._numbers: dict[int, int] = {}

    def number(self, value: Value) -> int:
        """The number of `value`, which has one from then on."""
        for node in in_order(value, self._numbers):
            self._add(node)
        self._note_leaves((value,))
        return self._numbers[id(value)]

    def _note_leaves(self, values: tuple[Value, ...]) -> None:
        numbers = self._numbers
        for value in values:
            if id(value) not in numbers:
                numbers[id(value)] = len(numbers)
                self.leaves.append(value)
                self.steps.append((value.shape, value.dtype, int(value.space)))

    def _add(self, node: Node) -> None:
        numbers = self._numbers
        self._note_leaves(node.values)
        if isinstance(node.op, Folded):
            given: Any = tuple([numbers[id(value)] for value in node.values])
        else:
            given = form_of((node.args, dict(node.kwargs)), Value, self._shown)
        # The dtype may depend on more than the arguments, as does that which torch gives a number.
        self.steps.append((node.op.key, given, tuple([value.dtype for value in node.outputs])))
        for value in node.outputs:
            numbers[id(value)] = len(numbers)

    def _shown(self, value: Value) -> tuple[str, int]:
        return "%", self._numbers[id(value)]
