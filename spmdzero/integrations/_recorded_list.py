"""A list that steps append to, as they collect numbers for the end of an epoch."""

from collections.abc import Callable
from typing import Any

from spmdzero.backend import map_tensors
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._recorded_calls import CallTarget, RecordedCalls


class RecordedList(list[Any], CallTarget):
    """Stands for a list of the module while a step runs: appends to it when the step is over.

    To who looks from outside of a step it is empty, and so the same at each step. A step that reads
    it finds the list's items and those that it has appended itself.

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


def _read(name: str) -> Callable[..., Any]:
    def call(self: RecordedList, *args: Any) -> Any:
        if not self.calls.recording:
            return getattr(list, name)(self, *args)
        self.was_read = True
        # None of its own are kept, nor would a trace allow it.
        items = [*self.real, *self.calls.noted(self.path, "append")]
        return getattr(items, name)(*args)

    return call


def _write(name: str) -> Callable[..., Any]:
    def call(self: RecordedList, *args: Any) -> Any:
        if not self.calls.recording:
            return getattr(list, name)(self, *args)
        self.was_read = True
        if self.was_extended:
            raise SpmdZeroUsageError(
                f"self.{self.path}.{name}(...) inside of a step that appends to the list: what is "
                "appended gets there when the step is over. Do it in a hook, on_train_batch_end "
                "for example"
            )
        return getattr(self.real, name)(*args)

    return call


for _name in (
    *("__len__", "__iter__", "__getitem__", "__contains__", "__reversed__", "__eq__", "__ne__"),
    *("__add__", "__mul__", "__repr__", "copy", "count", "index"),
):
    setattr(RecordedList, _name, _read(_name))
for _name in ("__setitem__", "__delitem__", "clear", "insert", "pop", "remove", "reverse", "sort"):
    setattr(RecordedList, _name, _write(_name))
