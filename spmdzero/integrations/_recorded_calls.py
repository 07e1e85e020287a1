"""Records the calls of a step to objects outside the model, and makes them after the forward.

Lightning runs a step inside the engine's forward, where a tensor belongs to one replica. So a
tensor that the step logs or passes to a metric leaves the forward as an output, and the call is
made outside with the tensor of all replicas. A replayed forward runs no Python: the calls are read
from the output, never from a trace.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from spmdzero.backend import found, map_tensors, mapped
from spmdzero.errors import SpmdZeroUsageError


@dataclasses.dataclass(frozen=True)
class Call:
    """One recorded call.

    Attributes:
        target: path of the object, "" for the LightningModule itself.
        method: name of the method.
        args, kwargs: the arguments, with `_Result`, `_Target` and `_Kept` in place of objects that
            can't be compared.
    """

    target: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Result:
    call: int


@dataclasses.dataclass(frozen=True)
class _Target:
    path: str


@dataclasses.dataclass(frozen=True)
class _Kept:
    index: int


_RECORDED = (_Result, _Target, _Kept)


class CallResult:
    """The unknown result of a recorded call, which a step can log and return."""

    def __init__(self, call: int, name: str) -> None:
        self._call, self._name = call, name

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raises SpmdZeroUsageError for any computation with the result."""
        raise SpmdZeroUsageError(
            f"the step computes with what {self._name}(...) returned. Metrics live on the host and "
            "are called when the step is over, with the rows of all devices: self.log their "
            "result, return it, or compute the number from the tensors with torch operations"
        )

    def __getattr__(self, name: str) -> Any:
        # Protocols look up such names to test for support.
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    __torch_function__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = refuse
    __rtruediv__ = __neg__ = __float__ = __int__ = __bool__ = __format__ = refuse
    __getitem__ = __iter__ = __len__ = __lt__ = __le__ = __gt__ = __ge__ = refuse


class CallTarget:
    """Base class of stand-ins, which know the path of the object that they replace."""

    path: str


class RecordedCalls:
    """Records calls while a forward runs, and makes them from its output.

    Args:
        resolve: returns the object of a path, outside of the forward.
    """

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self._resolve = resolve
        self._calls: dict[str, Call] | None = None
        self._kept: list[Any] = []

    @property
    def recording(self) -> bool:
        """Whether a forward is running."""
        return self._calls is not None

    def noted(self, target: str, method: str) -> list[Any]:
        """The arguments that this forward has passed so far to a method of one argument."""
        calls = (self._calls or {}).values()
        return [call.args[0] for call in calls if (call.target, call.method) == (target, method)]

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Records calls inside the context: the Python of a forward, perhaps within a backward."""
        before, self._calls = self._calls, {}
        try:
            yield
        finally:
            self._calls = before

    def note(self, target: str, method: str, /, *args: Any, **kwargs: Any) -> CallResult:
        """Records a call; in errors a name as its first argument tells it apart from others."""
        assert self._calls is not None
        label = repr(args[0]) if args and isinstance(args[0], str) else ""
        number, name = len(self._calls), f"self.{target}.{method}".replace("..", ".")
        self._calls[f"{number} {name}({label})"] = Call(
            target, method, self._form(args), self._form(kwargs)
        )
        return CallResult(number, name)

    def output(self, returned: Any) -> Any:
        """The forward's output: the step's outputs, together with the calls if there are any.

        The empty key keeps the paths of the outputs, by which a config may declare them.
        """
        if not self._calls:
            return returned
        return {"": mapped(returned, CallResult, _recorded), "calls": dict(self._calls)}

    def make(self, output: Any, *, given: Callable[[Call], Call]) -> Any:
        """Makes the calls in a forward's output, in their order; returns the step's outputs.

        Args:
            output: the result of the method `output`, with global tensors.
            given: takes a recorded call; returns the call to make.
        """
        results: list[Any] = []

        def known(value: Any) -> Any:
            if isinstance(value, _Result):
                return results[value.call]
            if isinstance(value, _Target):
                return self._resolve(value.path)
            return self._kept[value.index]

        for call in calls_of(output).values():
            made = given(call)
            method = getattr(self._resolve(made.target), made.method)
            args, kwargs = mapped((made.args, made.kwargs), _RECORDED, known)
            results.append(method(*args, **kwargs))
        return mapped(returned_of(output), _RECORDED, known)

    def _form(self, tree: Any) -> Any:
        return mapped(tree, (CallResult, CallTarget, torch.Tensor), _recorded, self._keep)

    def _keep(self, value: Any) -> _Kept:
        for index, known in enumerate(self._kept):
            if known is value:
                return _Kept(index)
        self._kept.append(value)
        return _Kept(len(self._kept) - 1)


def calls_of(output: Any) -> dict[str, Call]:
    """The calls in a forward's output."""
    return output["calls"] if _holds_calls(output) else {}


def returned_of(output: Any) -> Any:
    """The step's outputs in a forward's output, still without the results of calls."""
    return output[""] if _holds_calls(output) else output


def awaits_results(returned: Any) -> bool:
    """Whether the step's outputs hold the result of a call."""
    return bool(found(returned, _Result))


def _holds_calls(output: Any) -> bool:
    return type(output) is dict and output.keys() == {"", "calls"}


def _recorded(value: Any) -> Any:
    if isinstance(value, CallResult):
        return _Result(value._call)
    return _Target(value.path) if isinstance(value, CallTarget) else value


class RecordedList(list[Any], CallTarget):
    """Replaces a list of the module while a step runs; the step's appends are made after it.

    Seen from outside of a step it is empty, and so the same at each step. A step that reads it
    finds the list's items and those that the step has appended.

    Args:
        path: the list's attribute in the module.
        calls: records the appends.

    Attributes:
        real: the module's list.
        was_read, was_extended: whether any step has read it, or appended to it.
    """

    def __init__(self, path: str, calls: RecordedCalls) -> None:
        super().__init__()
        self.path, self.calls = path, calls
        self.real: list[Any] = []
        self.was_read = self.was_extended = False

    def append(self, value: Any) -> None:
        """Records the append of `value`; a tensor leaves the step without its graph."""
        if not self.calls.recording:
            super().append(value)
            return
        self.was_extended = True
        detached = map_tensors(value, lambda _, tensor: tensor.detach())
        self.calls.note(self.path, "append", detached)

    def extend(self, values: Any) -> None:
        """Appends each of `values`."""
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
        # The stand-in keeps no items of its own, which a trace would not allow.
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
