"""What tensors share that alias each other: torch's storage, of values that never change."""

import itertools
import weakref
from collections.abc import Iterator

from spmdzero._user_line import user_line
from spmdzero.backend.jax._graph import mark_of
from spmdzero.backend.jax._values import Op, Space, Value, record
from spmdzero.errors import SpmdZeroRuntimeError

_serial = itertools.count()
# By their ids. Another thread may make tensors, as one that loads batches: a list of a dict's
# values is made in one piece, where a WeakSet that changes meanwhile can't be gone through.
_cells: "dict[int, weakref.ref[Cell]]" = {}


class Cell:
    """Holds the value of a tensor and of what is detached from it or views it.

    Attributes:
        serial: no other has the same, as it may have an address once this one is gone.
        writes: how often it was written.
        stride: of the storage that torch believes it to be; None for a contiguous one.
        same: whether all hosts must have the same value, as of a parameter.
        home: the operation that brings to the host's memory what rests there; None for others.
        turned: whether a tensor of it was given another shape or place than it was made with.
    """

    __slots__ = (
        "__weakref__", "_value", "home", "same", "serial", "stride", "turned", "writes",
    )  # fmt: skip

    def __init__(self, value: Value, stride: tuple[int, ...] | None = None) -> None:
        self._value, self.writes, self.stride, self.same = value, 0, stride, False
        self.turned = False
        self.home: Op | None = None
        self.serial = next(_serial)
        value.holders += 1
        _cells[id(self)] = weakref.ref(self)

    def __del__(self) -> None:
        """Counts itself out.

        Python drops what is raised here: a Ctrl-C that comes just now, outside of `held`, is lost
        (press again), and the value may keep a holder too many, which costs its memory until it
        goes: it is not given away to a program. To hold signals would take 3 microseconds for
        each tensor that goes, ten times what its life takes.
        """
        self._value.holders -= 1
        _cells.pop(id(self), None)

    @property
    def value(self) -> Value:
        """What it holds now."""
        return self._value

    @value.setter
    def value(self, new: Value) -> None:
        if self.same:
            require_same(new)
        new.take_place_of(self._value)
        new.holders += 1
        self._value.holders -= 1
        self._value = new
        self.writes += 1

    def bring_home(self) -> None:
        """Has what it holds in the memory where it rests; an annotation is no write."""
        assert self.home is not None
        marked, value = mark_of(self._value), self._value
        if marked is None or marked.key != self.home.key:
            writes = self.writes
            (self.value,) = record(self.home, (value,), {}, [(value.shape, value.dtype)])
            self.writes = writes

    def succeeded_by(self, other: "Cell") -> "Cell":
        """`other`, which takes its place."""
        if self.same:
            require_same(other.value)
            other.same = True
        other.value.take_place_of(self._value)
        return other


def require_same(value: Value) -> None:
    """Raises SpmdZeroRuntimeError for what is another on each host, where all must have one."""
    if value.space is Space.HOST:
        raise SpmdZeroRuntimeError(
            f"{user_line()}: a value of this host's own, such as one computed from its rows, is "
            "written into a tensor that is the same on all hosts, such as a parameter. If all "
            "hosts have the same value, write it from the CPU: parameter.data.copy_(value.cpu())"
        )


def cells() -> Iterator[Cell]:
    """All that live."""
    for found in list(_cells.values()):
        cell = found()
        if cell is not None:
            yield cell


def pending_values() -> list[Value]:
    """What live tensors hold and is not started, each once, in the order in which it was made.

    What was written into a tensor that rests in the host's memory is brought there.

    What is computed from an input without data can't be started and is left out, and so is what
    failed, and what is computed on demand only.
    """
    pending = [cell for cell in cells() if cell.value.node is not None]
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
