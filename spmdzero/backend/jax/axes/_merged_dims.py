"""Values whose one dim torch has made of two, as of rows and heads or of rows and positions.

torch reshapes `[rows, heads, a, b]` to `[rows * heads, a, b]` before each product of more than
three dims, and `[rows, length, width]` to `[rows * length, width]` before each product with a
weight. Heads or positions that devices of a replica share have no shards then: XLA would gather
them. And on a TPU, whose memory has tiles of two dims, products of merged rows have other tiles
than attention's of rows and positions apart: libtpu copies from one to the other and back, and
keeps sums in 32 bits between. So such values are computed with both dims, for as long as operations
can.
"""

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from spmdzero.backend.forms._tree import found, mapped
from spmdzero.backend.jax.axes._slice import own_positions, sharing_axes
from spmdzero.backend.jax.graph._graph import Slot, Step
from spmdzero.backend.jax.graph._lowered import lowered
from spmdzero.backend.jax.graph._numbers import as_taken
from spmdzero.backend.jax.ops import activations, comparison, jax_dtype, pointwise, unary
from spmdzero.backend.jax.ops.matmul import product

_RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_TURNS = ("aten.t.default", "aten.transpose.int")
LOOP = "loop"
"""The first part of a loop's key; such an operation has a method `divided`."""
# Modules whose operations compute each element of its own.
_ELEMENTWISE = {module.__name__ for module in (activations, comparison, pointwise, unary)}
_OF_ALL = ("aten.sum.default", "aten.mean.default")
_COPIES = (("identity",), "aten.zeros_like.default", "aten.ones_like.default")
# Operations that mix no elements along dims other than those in these places of their arguments.
_ALONG = {
    "aten._log_softmax.default": (1,),
    "aten._log_softmax_backward_data.default": (2,),
    "aten._softmax.default": (1,),
    "aten._softmax_backward_data.default": (2,),
    "aten.amax.default": (1,),
    "aten.gather.default": (1,),
    "aten.scatter.value": (1,),
    "aten.scatter.src": (1,),
    "aten.scatter_add.default": (1,),
    "aten.squeeze.dim": (1,),
    "aten.sum.dim_IntList": (1,),
    "aten.transpose.int": (1, 2),
    "aten.unsqueeze.default": (1,),
}
# Operations of which a result has a row for each row of the merged operands.
_PRODUCTS = {
    "aten.mm.default": (True, False),
    "aten.addmm.default": (False, True, False),
    "aten.bmm.default": (True, True),
}


class MergedDims:
    """The arrays of a graph's region with two dims where torch has one, the first of a value.

    Args:
        outputs: numbers of the slots that leave the program, in torch's form.
        rows: whether rows and positions stay apart too, and not only rows and heads.
    """

    def __init__(self, outputs: Container[int], *, rows: bool) -> None:
        self._outputs, self._rows = outputs, rows
        # Number of a slot -> its array with one dim more, in the present phase; and of a slot whose
        # last dim is such a one, the array that it is transposed from.
        self._apart: dict[int, Any] = {}
        self._turned: dict[int, Any] = {}
        # Number of a slot with a loop's stack `[times, ...]` -> its array with one dim more.
        self._stacks: dict[int, Any] = {}
        # Numbers of slots of half precision that are read in fp32 alone.
        self._widened = set[int]()
        self._kept, self._kept_turned = set[int](), set[int]()
        self._kept_stacks = set[int]()

    def begin(self, steps: Sequence[Step], kept: Container[int]) -> None:
        """Notes what a phase does with its values before it runs.

        Args:
            steps: its operations.
            kept: numbers of the slots that are read after it.
        """
        readers = Counter(s.number for step in steps for s in found((step.args, step.kwargs), Slot))
        self._widened = set()
        for step in reversed(steps):
            if step.op.key == "aten._to_copy.default":
                widens = step.made[0].dtype == torch.float32
            else:
                same = step.op.key in (*_TURNS, *_RESHAPES, *_COPIES[:1])
                widens = same and step.made[0].number in self._widened
            if widens:
                slots = found((step.args, step.kwargs), Slot)
                self._widened |= {
                    s.number for s in slots if readers[s.number] == 1 and s.number not in kept
                }

    def leave(self, number: int, array: Any) -> Any:
        """The form in which a value of one phase is kept for later ones."""
        if number in self._outputs:
            return array
        for apart, kept in (
            (self._apart, self._kept),
            (self._stacks, self._kept_stacks),
            (self._turned, self._kept_turned),
        ):
            if number in apart:
                kept.add(number)
                return apart[number]
        return array

    def enter(self, slot: Slot, array: Any) -> Any:
        """The value of a slot in torch's form, from what `leave` returned."""
        if slot.number in self._kept_turned:
            self._turned[slot.number] = array
            return array.reshape(slot.shape[::-1]).T
        if slot.number in self._kept_stacks:
            self._stacks[slot.number] = array
            return array.reshape(slot.shape)
        return self.take(slot, array) if slot.number in self._kept else array

    def take(self, slot: Slot, array: Any) -> Any:
        """The value of a slot in torch's form, from its array with one dim more."""
        self._apart[slot.number] = array
        return array.reshape(slot.shape)

    def apart(self, number: int) -> Any | None:
        """The array of a slot with one dim more, None where it has none."""
        return self._apart.get(number)

    def end(self) -> None:
        """Ends a phase, whose arrays no later one may use."""
        self._apart, self._turned, self._stacks = {}, {}, {}

    def computes(self, step: Step, slots: list[Slot], known: dict[int, Any]) -> bool:
        """Whether it has added the result of `step` to `known`, or needs no more than torch's form.

        Args:
            step: an operation of the region.
            slots: its operands.
            known: number of a slot -> array, of all operands.
        """
        if step.op.key[0] == LOOP:
            self._loops(step, known)
            return True
        if not slots or len(step.made) != 1:
            return False
        made, key = step.made[0], step.op.key
        if key in _RESHAPES:
            return self._reshapes(slots[0], made, known)
        if not any(slot.number in self._apart or slot.number in self._turned for slot in slots):
            return False
        if key in _TURNS and len(made.shape) == 2:
            self._turns(slots[0], made)
            return False
        if key == "aten.mm.default" and self._contracts(slots, made, known):
            return True
        if key == "aten.sum.dim_IntList" and self._sums(step, slots[0], made, known):
            return True
        if key in _OF_ALL and len(slots) == 1 and slots[0].number in self._apart:
            array = self._apart[slots[0].number]
            (known[made.number],) = lowered(step.op, (array,), step.kwargs, _forms(step))
            return True
        divided = {self._apart[s.number].shape[:2] for s in slots if s.number in self._apart}
        if len(divided) != 1 or not self._is_by_row(step, slots):
            return False
        (result,) = self._by_row(step, slots, divided.pop(), known)
        self._add(made, result, known)
        return True

    def _loops(self, step: Step, known: dict[int, Any]) -> None:
        """Runs a loop, whose stacks keep both dims on their way to another loop."""
        arrays = [self._stacks.get(slot.number, known[slot.number]) for slot in step.args]
        results = step.op.divided(arrays, rows=self._rows)
        for slot, array in zip(step.made, results, strict=True):
            if array.ndim > len(slot.shape):
                self._stacks[slot.number] = array
            known[slot.number] = array.reshape(slot.shape)

    def _add(self, made: Slot, array: Any, known: dict[int, Any]) -> None:
        self._apart[made.number] = array
        known[made.number] = array.reshape(made.shape)

    def _reshapes(self, slot: Slot, made: Slot, known: dict[int, Any]) -> bool:
        before, array = slot.shape, self._apart.get(slot.number)
        if array is not None:
            if made.shape[:2] == array.shape[:2]:
                known[made.number] = array.reshape(made.shape)
                return True
            if made.shape[:1] == before[:1]:
                self._add(made, array.reshape(*array.shape[:2], *made.shape[1:]), known)
                return True
            return False
        if len(before) < 2 or made.shape[:1] != (before[0] * before[1],):
            return False
        heads = before[0] > 1 and len(before) == 4 and made.shape[1:] == before[2:]
        if self._rows or heads:
            apart = known[slot.number].reshape(*before[:2], *made.shape[1:])
            if self._rows and jnp.issubdtype(apart.dtype, jnp.integer):
                # Labels. Where no axis divides positions they stay merged: libtpu 0.0.21 aborts on
                # labels apart, with the flags of a set.
                if "sequence" not in sharing_axes():
                    return False
                # What is computed of logits meets each device's own.
                apart = own_positions(apart)
            self._apart[made.number] = apart
        return False

    def _turns(self, slot: Slot, made: Slot) -> None:
        """Notes what the transposed form of a matrix is transposed from."""
        if slot.number in self._apart:
            self._turned[made.number] = self._apart[slot.number]
        elif slot.number in self._turned:
            self._apart[made.number] = self._turned[slot.number]

    def _contracts(self, slots: list[Slot], made: Slot, known: dict[int, Any]) -> bool:
        """Whether a product adds up over both dims, as a weight's gradient does."""
        first, second = (slots * 2)[:2]
        a, b = self._turned.get(first.number), self._apart.get(second.number)
        if a is None or b is None or a.shape[:2] != b.shape[:2]:
            return False
        # Devices that share rows add their parts up in the dtype in which gradients are reduced.
        wide = "sequence" in sharing_axes() and made.number in self._widened
        result = product(a, b, ((0, 1), (0, 1)), wide=wide)
        known[made.number] = result.astype(jax_dtype(made.dtype))
        return True

    def _sums(self, step: Step, slot: Slot, made: Slot, known: dict[int, Any]) -> bool:
        """Whether it sums over both dims, as a bias's gradient does."""
        array, dims = self._apart.get(slot.number), list(step.args[1] or [])
        if array is None or {dim % len(slot.shape) for dim in dims} != {0}:
            return False
        rest = dict(step.kwargs)
        (result,) = lowered(step.op, (array, [0, 1], False), rest, None)
        known[made.number] = result.reshape(made.shape).astype(jax_dtype(made.dtype))
        return True

    def _is_by_row(self, step: Step, slots: list[Slot]) -> bool:
        """Whether each row of the result is computed of the operands' same row."""
        key, made = step.op.key, step.made[0]
        if key in _PRODUCTS:
            wanted = _PRODUCTS[key]
            if not wanted[0] and len(slots[0].shape) != 1:
                return False
            return len(slots) == len(wanted) == len(step.args) and all(
                (slot.number in self._apart) == by_row
                for slot, by_row in zip(slots, wanted, strict=True)
            )
        if any(slot.number in self._turned for slot in slots):
            return False
        if key in _COPIES or getattr(_function(step), "__module__", "") in _ELEMENTWISE:
            return all(
                _has_rows_of(slot, made)
                or (slot.number not in self._apart and _is_for_all_rows(slot, made))
                for slot in slots
            )
        # The indices of a scatter may have fewer rows, and what it writes may have more.
        if key not in _ALONG or any(slot.shape[:1] != made.shape[:1] for slot in slots):
            return False
        given = [step.args[place] for place in _ALONG[key] if place < len(step.args)]
        count = max(len(slots[0].shape), len(made.shape))
        dims = [dim for each in given for dim in (each if isinstance(each, Sequence) else [each])]
        return bool(dims) and all(dim % count for dim in dims)

    def _by_row(
        self, step: Step, slots: list[Slot], two: tuple[int, int], known: dict[int, Any]
    ) -> list[Any]:
        """The results of an operation of each of the first dim's parts, `two[0]` of `two[1]`."""
        made, count = step.made[0], two[0] * two[1]
        arrays, axes = list[Any](), list[int | None]()
        places = {slot.number: place for place, slot in enumerate(slots)}
        rank = max(len(slot.shape) for slot in slots)
        for slot in slots:
            array = self._apart.get(slot.number)
            whole = len(slot.shape) == rank and slot.shape[0] == count
            if array is None and whole and step.op.key not in _PRODUCTS:
                array = known[slot.number].reshape(*two, *slot.shape[1:])
            arrays.append(known[slot.number] if array is None else array)
            axes.append(None if array is None else 0)

        def of_one(*mine: Any) -> list[Any]:
            def taken(slot: Slot) -> Any:
                return as_taken(slot, mine[places[slot.number]])

            args, kwargs = mapped((step.args, step.kwargs), Slot, taken)
            return lowered(step.op, args, kwargs, [((two[1], *made.shape[1:]), made.dtype)])

        return jax.vmap(of_one, in_axes=tuple(axes))(*arrays)


def _forms(step: Step) -> list[Any]:
    return [(slot.shape, slot.dtype) for slot in step.made]


def _function(step: Step) -> Any:
    return getattr(step.op, "function", None)


def _has_rows_of(slot: Slot, made: Slot) -> bool:
    """Whether an operand has the result's first dim."""
    return len(slot.shape) == len(made.shape) and slot.shape[:1] == made.shape[:1]


def _is_for_all_rows(slot: Slot, made: Slot) -> bool:
    """Whether an operand is the same for all of the result's first dim."""
    missing = len(made.shape) - len(slot.shape)
    return missing > 0 or (missing == 0 and slot.shape[0] == 1)
