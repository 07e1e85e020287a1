"""A list that steps append to, as they collect numbers for the end of an epoch."""

from collections.abc import Callable
from typing import Any

from spmdzero.backend import map_tensors
from spmdzero.integrations._recorded_calls import CallTarget, RecordedCalls


class RecordedList(list[Any], CallTarget):
    """Stands for a list of the module while a step runs: appends to it when the step is over.

    To who looks from outside of a step it is empty, and so the same at each step. What a step
    reads of it is the list's own.

    Args:
        path: the attribute.
        calls: take the notes.

    Attributes:
        real: the list.
        was_read, was_extended: what steps have done with it so far.
    """

    def __init__(self, path: str, calls: RecordedCalls) -> None:
        super().__init__()
        self.path, self.calls = path, calls
        self.real: list[Any] = []
        self.was_read = self.was_extended = False

    def append(self, value: Any) -> None:
        """Takes note of it; a tensor leaves the step without its graph."""
        if not self.calls.recording:
            super().append(value)
            return
        self.was_extended = True
        detached = map_tensors(value, lambda _, tensor: tensor.detach())
        self.calls.note(self.path, "append", detached)

    def extend(self, values: Any) -> None:
        """Appends each."""
        for value in values:
            self.append(value)

    def __iadd__(self, values: Any) -> Any:
        self.extend(values)
        return self


def _of_the_real(name: str) -> Callable[..., Any]:
    def call(self: RecordedList, *args: Any) -> Any:
        if not self.calls.recording:
            return getattr(list, name)(self, *args)
        self.was_read = True
        return getattr(self.real, name)(*args)

    return call


_READS = (
    *("__len__", "__iter__", "__getitem__", "__setitem__", "__delitem__", "__contains__"),
    *("__reversed__", "__eq__", "__ne__", "__add__", "__mul__", "__repr__", "clear", "copy"),
    *("count", "index", "insert", "pop", "remove", "reverse", "sort"),
)
for _name in _READS:
    setattr(RecordedList, _name, _of_the_real(_name))
