"""Graphs of recorded operations: their order, and their keys."""

import dataclasses
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator, Sequence
from typing import Any

from spmdzero.backend.forms._tree import form_of, found, mapped
from spmdzero.backend.jax.lazy._values import Node, Space, Value

_MARKS = ("mark", "leave")


@dataclasses.dataclass(frozen=True, eq=False)
class Folded:
    """A graph that counts as one operation in other graphs, in which its steps replace it.

    Attributes:
        key: that of the graph.
        graph: the operations.
        makes: see `Op`.
    """

    key: Any
    graph: "Graph"
    makes: Space | None = Space.GLOBAL

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Is never called, as `Graph.of` replaces the operation with the graph's steps."""
        raise AssertionError


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One operation of a graph, on numbered slots.

    Attributes:
        op, args, kwargs: those of the node, with slots in the place of values.
        made: the slots of its results.
        space, scope, place: those of the node.
    """

    op: Any
    args: Any
    kwargs: Any
    made: tuple["Slot", ...]
    space: Space
    scope: tuple[str, ...]
    place: tuple[str, int] | None


@dataclasses.dataclass(eq=False)
class Slot:
    """A value in a graph: shape, dtype and space; its number orders it."""

    number: int
    shape: tuple[int, ...]
    dtype: Any
    space: Space


class Graph:
    """An ordered graph of operations.

    Attributes:
        inputs: the slots of its arguments.
        outputs: the slots of its results.
        steps: the operations in between.
    """

    def __init__(
        self, inputs: tuple[Slot, ...], outputs: tuple[Slot, ...], steps: tuple[Step, ...]
    ) -> None:
        self.inputs, self.outputs, self.steps = inputs, outputs, steps
        # Reordered graphs are kept: computing the key of thousands of steps takes time.
        self._ordered: dict[tuple[int, ...], Graph] = {}

    @functools.cached_property
    def key(self) -> bytes:
        """The key of the graph, equal for graphs that compute the same."""
        return _digest(self)

    def ordered(self, order: Sequence[int]) -> "Graph":
        """The same graph with its outputs in another order, given by their numbers."""
        order = tuple(order)
        if order not in self._ordered:
            outputs = tuple([self.outputs[place] for place in order])
            self._ordered[order] = Graph(self.inputs, outputs, self.steps)
        return self._ordered[order]

    @functools.cached_property
    def marks(self) -> dict[int, Any]:
        """Maps a slot's number to the operation that sets its sharding by `mesh` and `spec`."""
        said = (step for step in self.steps if step.op.key[0] in _MARKS)
        return {step.made[0].number: step.op for step in said}

    def common(self, leaves: Sequence[Value]) -> list[bool]:
        """Whether each output is the same for each replica and host, by how it is computed."""
        given = zip(self.inputs, leaves, strict=True)
        common = {slot.number for slot, leaf in given if leaf.common}
        for step in self.steps:
            divides = step.op.key[0] == "enter" and any(step.op.spec)
            if not divides and common.issuperset(
                [slot.number for slot in found((step.args, step.kwargs), Slot)]
            ):
                common |= {slot.number for slot in step.made}
        return [slot.number in common for slot in self.outputs]

    @classmethod
    def of(cls, roots: Sequence[Value]) -> tuple["Graph", list[Value]]:
        """The graph that computes `roots`, and the values that are its inputs.

        Equal operations on equal inputs become one.
        """
        builder = _Builder()
        outputs = tuple([builder.slot(root) for root in roots])
        slots = tuple(builder.given.values())
        graph = cls(slots, outputs, tuple(builder.steps))
        if any(isinstance(step.op, Folded) for step in graph.steps):
            graph = _expanded(graph)
        return graph, list(builder.leaves)


def mark_of(value: Value) -> Any:
    """The operation that sets the sharding of a pending value; None if there is none."""
    if value.node is None:
        return None
    op: Any = value.node.op
    if isinstance(op, Folded):
        return op.graph.marks.get(op.graph.outputs[value.index].number)
    return op if op.key[0] in _MARKS else None


class _Builder:
    """Collects the steps of a graph, equal ones once."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.given: dict[int, Slot] = {}
        self.leaves: list[Value] = []
        # Id of a node -> the slots of its results.
        self._made: dict[int, tuple[Slot, ...]] = {}
        self._known: dict[Any, tuple[Slot, ...]] = {}
        self._count = 0

    def slot(self, root: Value) -> Slot:
        for node in in_order(root, self._made):
            self._add(node)
        return self._get(root)

    def new(self, shape: Any, dtype: Any, space: Space) -> Slot:
        """A slot with a new number."""
        self._count += 1
        return Slot(self._count, tuple(shape), dtype, space)

    def _leaf(self, value: Value) -> Slot:
        slot = self.given[id(value)] = self.new(value.shape, value.dtype, value.space)
        self.leaves.append(value)
        return slot

    def _add(self, node: Node) -> None:
        get = self._get
        for value in node.values:
            get(value)
        args, kwargs = mapped(node.args, Value, get), mapped(dict(node.kwargs), Value, get)
        self._made[id(node)] = self._step(node, args, kwargs, node.forms)

    def _get(self, value: Value) -> Slot:
        if value.node is not None:
            return self._made[id(value.node)][value.index]
        return self.given.get(id(value)) or self._leaf(value)

    def _step(
        self, like: Node | Step, args: Any, kwargs: Any, forms: Sequence[tuple[Any, Any]]
    ) -> tuple[Slot, ...]:
        given = form_of(args, Slot, _numbered), form_of(kwargs, Slot, _numbered)
        known = (like.op.key, given, tuple([dtype for _, dtype in forms]))
        if known not in self._known:
            made = tuple([self.new(shape, dtype, like.space) for shape, dtype in forms])
            step = Step(like.op, args, kwargs, made, like.space, like.scope, like.place)
            self.steps.append(step)
            self._known[known] = made
        return self._known[known]

    def inline(self, graph: Graph, given: Sequence[Slot]) -> tuple[Slot, ...]:
        """The graph's outputs for these inputs; graphs folded in it are inlined too."""
        moved = dict(zip((slot.number for slot in graph.inputs), given, strict=True))

        def get(slot: Slot) -> Slot:
            return moved[slot.number]

        for step in graph.steps:
            args, kwargs = mapped(step.args, Slot, get), mapped(step.kwargs, Slot, get)
            if isinstance(step.op, Folded):
                made = self.inline(step.op.graph, args)
            else:
                forms = [(slot.shape, slot.dtype) for slot in step.made]
                made = self._step(step, args, kwargs, forms)
            moved |= {old.number: new for old, new in zip(step.made, made, strict=True)}
        return tuple([moved[slot.number] for slot in graph.outputs])


# Key, names and lines of a graph with folded graphs -> the graph without any. Each step of training
# makes the same graph of thousands of operations again.
_unfolded: OrderedDict[Any, Graph] = OrderedDict()
_MOST = 512


def _expanded(graph: Graph) -> Graph:
    """The same graph with the steps of each graph that is folded in it."""
    known = graph.key, tuple([(step.scope, step.place) for step in graph.steps])
    if known not in _unfolded:
        builder = _Builder()
        given = tuple([builder.new(slot.shape, slot.dtype, slot.space) for slot in graph.inputs])
        outputs = builder.inline(graph, given)
        _unfolded[known] = Graph(given, outputs, tuple(builder.steps))
        if len(_unfolded) > _MOST:
            _unfolded.popitem(last=False)
    _unfolded.move_to_end(known)
    return _unfolded[known]


def in_order(root: Value, known: Container[int]) -> Iterator[Node]:
    """The nodes that `root` needs, inputs first; without recursion, because graphs are deep.

    Args:
        known: ids of the nodes that were seen before.
    """
    if root.node is None:
        return
    done: set[int] = set()
    stack: list[tuple[Node, bool]] = [(root.node, False)]
    while stack:
        node, ready = stack.pop()
        if id(node) in done or id(node) in known:
            continue
        if ready:
            done.add(id(node))
            yield node
            continue
        stack.append((node, True))
        for value in reversed(node.values):
            before = value.node
            if before is not None and id(before) not in known and id(before) not in done:
                stack.append((before, False))


def _numbered(slot: Slot) -> tuple[str, int]:
    return "%", slot.number


def _digest(graph: Graph) -> bytes:
    numbers: dict[int, int] = {}

    def number(slot: Slot) -> tuple[str, int]:
        return "%", numbers.setdefault(slot.number, len(numbers))

    digest = hashlib.sha256()
    for slot in graph.inputs:
        number(slot)
        digest.update(repr((slot.shape, str(slot.dtype), int(slot.space))).encode())
    for step in graph.steps:
        given = [form_of(step.args, Slot, number), form_of(step.kwargs, Slot, number)]
        # The dtype may depend on more than the arguments, as does that which torch gives a number.
        made = [str(slot.dtype) for slot in step.made]
        digest.update(repr((step.op.key, given, made)).encode())
        for slot in step.made:
            number(slot)
    digest.update(repr([numbers[slot.number] for slot in graph.outputs]).encode())
    return digest.digest()


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
