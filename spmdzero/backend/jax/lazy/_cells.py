"""Cells: values shared by tensors that alias each other, in the place of torch's storage."""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence

from spmdzero._user_line import user_line
from spmdzero.backend.jax.graph._graph import mark_of
from spmdzero.backend.jax.graph._operations import MeshOp
from spmdzero.backend.jax.lazy._values import Space, Value, record
from spmdzero.errors import SpmdZeroRuntimeError

_serial = itertools.count()
# A dict by ids, because another thread, as one that loads batches, may make tensors meanwhile: its
# values are copied to a list at once, while a WeakSet must not change during a walk.
_cells: "dict[int, weakref.ref[Cell]]" = {}
# Those that were given a pending value, which may have been computed since.
_written: "dict[int, weakref.ref[Cell]]" = {}


class Cell:
    """Holds the value shared by a tensor, its detached copies and its views.

    Attributes:
        held: the current value, set by `value`.
        serial: a number that no other cell has, even one at the same address later.
        writes: number of writes so far.
        stride: of the storage that torch believes in; None for a contiguous one.
        same: whether all hosts must have the same value, as of a parameter.
        home: the operation that brings its values to the host's memory, if it rests there.
        turned: whether one of its tensors was given another shape or place in the storage.
    """

    __slots__ = (
        "__weakref__", "held", "home", "same", "serial", "stride", "turned", "writes",
    )  # fmt: skip

    def __init__(self, value: Value, stride: tuple[int, ...] | None = None) -> None:
        self.held, self.writes, self.stride, self.same = value, 0, stride, False
        self.turned = False
        self.home: MeshOp | None = None
        self.serial = next(_serial)
        value.holders += 1
        _cells[id(self)] = weakref.ref(self)
        if value.node is not None:
            _written[id(self)] = _cells[id(self)]

    # At Python's end the names of this module may be gone already.
    def __del__(self, forget: Callable[..., object] = _cells.pop) -> None:
        """Counts this cell out of its value's holders; one that was never given a value has none.

        Python drops exceptions raised here: a Ctrl-C at this very moment, outside `held`, is lost
        (press again). Then the value may count one holder too many, and is not donated to a program
        until it goes. Holding signals would take 3 microseconds for each tensor that goes, ten
        times its whole life.
        """
        value = getattr(self, "held", None)
        if value is not None:
            value.holders -= 1
            forget(id(self), None)

    @property
    def value(self) -> Value:
        """The current value."""
        return self.held

    @value.setter
    def value(self, new: Value) -> None:
        if self.same:
            require_same(new)
        new.take_place_of(self.held)
        new.holders += 1
        self.held.holders -= 1
        self.held = new
        self.writes += 1
        if new.node is not None:
            _written[id(self)] = _cells[id(self)]

    def bring_home(self) -> None:
        """Has what it holds in the memory where it rests; an annotation is no write."""
        assert self.home is not None
        marked, value = mark_of(self.held), self.held
        if marked is None or marked.key != self.home.key:
            writes = self.writes
            (self.value,) = record(self.home, (value,), {}, [(value.shape, value.dtype)])
            self.writes = writes

    def succeeded_by(self, other: "Cell") -> "Cell":
        """Returns `other`, after it has taken the place of this cell."""
        if self.same:
            require_same(other.value)
            other.same = True
        other.value.take_place_of(self.held)
        return other


def require_same(value: Value) -> None:
    """Raises SpmdZeroRuntimeError for a host's own value, where all hosts must have the same."""
    if value.space is Space.HOST:
        raise SpmdZeroRuntimeError(
            f"{user_line()}: a value of this host's own, such as one computed from its rows, is "
            "written into a tensor that is the same on all hosts, such as a parameter. If all "
            "hosts have the same value, write it from the CPU: parameter.data.copy_(value.cpu())"
        )


def cells() -> Iterator[Cell]:
    """All live cells."""
    for found in list(_cells.values()):
        cell = found()
        if cell is not None:
            yield cell


def _pending_cells() -> list[Cell]:
    """The cells that hold a pending value; forgets those of `_written` that don't any more."""
    pending: list[Cell] = []
    for key, found in list(_written.items()):
        cell = found()
        if cell is not None and cell.held.node is not None:
            pending.append(cell)
            continue
        dropped = _written.pop(key, found)
        # Another thread may have put one there, or written into this one, meanwhile.
        if dropped is not found or (cell is not None and cell.held.node is not None):
            _written[key] = dropped
    return pending


class Kept:
    """Values that no program overwrites as long as this object lives.

    Attributes:
        values: the values.
        first: what is done before another program starts, which may compute the values too.
    """

    def __init__(self, values: Sequence[Value], first: Callable[[], None] | None = None) -> None:
        self.values, self.first = tuple(values), first
        for value in self.values:
            value.holders += 1
        _kept.add(self)

    def __del__(self) -> None:
        """Lets programs overwrite the values; see `Cell.__del__` for a Ctrl-C here."""
        self.release()

    def release(self) -> None:
        """Does now what the end of this object's life would do."""
        for value in self.values:
            value.holders -= 1
        self.values = ()


_kept: "weakref.WeakSet[Kept]" = weakref.WeakSet()


def pending_values(*, but: Kept | None = None) -> list[Value]:
    """Pending values of live tensors, each once, in the order in which they were made.

    A value that was written into a tensor that rests in the host's memory is brought there. Left
    out are values that come from an input without data, which can't be started, values that failed,
    and values that are computed only on demand.

    Args:
        but: values for whose sake nothing is done first.
    """
    for kept in [*_kept]:
        if kept is not but and kept.first is not None:
            kept.first()
    pending = _pending_cells()
    for cell in pending:
        if cell.home is not None:
            cell.bring_home()
    values = [cell.value for cell in pending]
    found = {
        id(value): value
        for value in values
        if not (value.stand_in or value.failed or value.on_demand)
    }
    return sorted(found.values(), key=lambda value: value.serial)
