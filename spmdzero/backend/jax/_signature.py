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
        # Of a leaf by its id, and of a node's first result by the node's.
        self._numbers: dict[int, int] = {}
        self._count = 0

    def number(self, value: Value) -> int:
        """The number of `value`, which has one from then on."""
        for node in in_order(value, self._numbers):
            self._add(node)
        return self._number(value, said=False)

    def _number(self, value: Value, *, said: bool) -> int:
        if value.node is not None:
            return self._numbers[id(value.node)] + value.index
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = self._count
            self._count += 1
            self.leaves.append(value)
            if not said:
                self.steps.append((value.shape, value.dtype, int(value.space)))
        return number

    def _add(self, node: Node) -> None:
        if isinstance(node.op, Folded):
            # Its key has the forms of what it takes.
            given: Any = tuple([self._number(value, said=True) for value in node.values])
        else:
            for value in node.values:
                self._number(value, said=False)
            given = form_of((node.args, dict(node.kwargs)), Value, self._shown)
        # The dtype may depend on more than the arguments, as does that which torch gives a number.
        self.steps.append((node.op.key, given, tuple([dtype for _, dtype in node.forms])))
        self._numbers[id(node)] = self._count
        self._count += len(node.forms)

    def _shown(self, value: Value) -> tuple[str, int]:
        return "%", self._number(value, said=False)
