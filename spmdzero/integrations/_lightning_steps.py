"""Runs the steps of a LightningModule in an engine's forward."""

import contextlib
import dataclasses
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from lightning import LightningModule, Trainer
from torch import nn

from spmdzero.backend import local_replicas, map_tensors, runtime
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations import _lightning_private as private
from spmdzero.integrations._client_engine import ClientEngine
from spmdzero.integrations._deferred import DeferredTensor
from spmdzero.integrations._recorded_calls import (
    Call,
    CallResult,
    CallTarget,
    RecordedCalls,
    RecordedList,
    awaits_results,
    returned_of,
)
from spmdzero.integrations._trainer import TrainerReads


class LightningSteps:
    """Calls `training_step` and the other steps through `engine`, and logs for them.

    While a step's Python runs, some attributes of its module are replaced: `self.log` records calls
    (`RecordedCalls`), a stand-in for a metric does so too, `self.trainer` remembers which values
    were read, and `self.device` is the device of the tensors. The replacements are the same objects
    at each step, so that the engine sees no change.

    Args:
        module: the user's module.
        trainer: the trainer that runs the loop.
        engine: the engine that trains the module.
    """

    def __init__(self, module: LightningModule, trainer: Trainer, engine: ClientEngine) -> None:
        private.know_metrics(module)
        self._module, self._engine = module, engine
        self._calls = RecordedCalls(self._resolve)
        self._reads = TrainerReads(trainer)
        own = vars(module)
        self._forward = own.get("forward", types.MethodType(type(module).forward, module))
        self._replaced: list[tuple[dict[str, Any], str, Any]] = [
            (own, "forward", self._run),
            (own, "log", functools.partial(_log, module, self._calls)),
            (own, "log_dict", functools.partial(_log_dict, module, self._calls)),
            (own, "all_gather", _refuse_gather),
            *private.replaced_in_steps(module, trainer=self._reads, device=engine.device),
        ]
        for path, place, name in private.metrics_of(module):
            self._replaced.append((place, name, _MetricStandIn(path, self._calls)))
        self._lists: dict[str, RecordedList] = {}
        self._waiting: Callable[[], Any] | None = None

    def __call__(self, method: str, *args: Any, later: bool = False, **kwargs: Any) -> Any:
        """Runs a step; returns its outputs as global tensors.

        Args:
            method: the step's name, for example ``"training_step"``.
            args, kwargs: the step's arguments.
            later: whether its log calls may wait for `finish`.

        Raises:
            SpmdZeroUsageError: as in `Engine.forward`; or the step uses a metric in a way that is
                impossible inside of a forward.
        """
        # The step before may have returned no loss, and then nothing has finished it.
        self.finish()
        step = getattr(self._module, method)
        named = inspect.signature(step).bind(*args, **kwargs).arguments
        if torch.is_grad_enabled():
            self._leave_index_out(step, named)
        with values_in([*self._replaced, *self._recorded_lists()]):
            inputs = {"step": method, "arguments": dict(named), "reads": self._reads.now()}
            output = self._engine(**inputs)
        if not torch.is_grad_enabled():
            # If the values were read one by one, each would need a program with its own forward.
            runtime.sync()
            output = map_tensors(output, lambda _, tensor: tensor.cpu())
        shared = self._engine.shares_rows((), inputs)
        factor = local_replicas(self._engine.mesh.spec) if shared else 1
        self._waiting = functools.partial(self._make_calls, output, method, factor)
        if not later or awaits_results(returned_of(output)):
            return self.finish()
        return returned_of(output)

    def finish(self) -> Any:
        """Makes the waiting calls, if any; returns the step's outputs."""
        waiting, self._waiting = self._waiting, None
        return waiting() if waiting is not None else None

    def _make_calls(self, output: Any, method: str, replicas: int) -> Any:
        with private.inside_hook(self._module, method):
            return self._calls.make(output, given=functools.partial(_given, replicas))

    def _recorded_lists(self) -> list[tuple[dict[str, Any], str, Any]]:
        """The module's lists, except those that steps only read, which the engine watches."""
        found: list[tuple[dict[str, Any], str, Any]] = []
        for name, value in vars(self._module).items():
            if type(value) is not list:
                continue
            stand_in = self._lists.setdefault(name, RecordedList(name, self._calls))
            if stand_in.was_read and stand_in.was_extended:
                self._reads.note_changing(f"self.{name}, to which it also appends")
            if stand_in.was_extended or not stand_in.was_read:
                stand_in.real = value
                found.append((vars(self._module), name, stand_in))
        return found

    def _run(self, *, step: str, arguments: Mapping[str, Any], reads: Any) -> Any:
        """The module's forward for the engine; `reads` only distinguishes kinds of the forward."""
        method = getattr(self._module, step)
        bound = inspect.signature(method).bind_partial()
        bound.arguments.update(arguments)
        # The step calls `self(x)`.
        with self._calls.record(), values_in([(vars(self._module), "forward", self._forward)]):
            return self._calls.output(method(*bound.args, **bound.kwargs))

    def _resolve(self, path: str) -> Any:
        return functools.reduce(getattr, path.split("."), self._module) if path else self._module

    def _leave_index_out(self, step: Callable[..., Any], named: dict[str, Any]) -> None:
        """Gives a step that never reads its `batch_idx` the same number at each call."""
        names = list(named)
        if len(names) > 1 and not _reads_parameter(step, names[1]):
            named[names[1]] = 0
        elif len(names) > 1 or _takes_any(step):
            self._reads.note_changing("its batch_idx")


class _MetricStandIn(nn.Module, CallTarget):
    def __init__(self, path: str, calls: RecordedCalls) -> None:
        super().__init__()
        self.path, self._calls = path, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._note("__call__", args, kwargs)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._note("update", args, kwargs)

    def compute(self) -> Any:
        return self._note("compute", (), {})

    def reset(self) -> None:
        self._note("reset", (), {})

    def __getitem__(self, key: str) -> "_MetricStandIn":
        return _MetricStandIn(f"{self.path}.{key}", self._calls)

    def __getattr__(self, name: str) -> NoReturn:
        raise SpmdZeroUsageError(
            f"self.{self.path}.{name} inside of a step: a metric lives on the host, and a step on "
            "the devices. There are update, compute, reset and the call; anything else belongs "
            "into a hook, such as on_train_batch_end"
        )

    def _note(self, method: str, args: Any, kwargs: Any) -> Any:
        args, kwargs = map_tensors((args, kwargs), lambda _, tensor: tensor.detach())
        return self._calls.note(self.path, method, *args, **kwargs)


def _log(module: LightningModule, calls: RecordedCalls, *args: Any, **kwargs: Any) -> None:
    """`LightningModule.log` inside of a step."""
    given = inspect.signature(LightningModule.log).bind(module, *args, **kwargs).arguments
    options = {key: value for key, value in given.items() if key not in ("self", "name", "value")}
    name, value, graph = given["name"], given["value"], options.get("enable_graph", False)
    reduction = options.get("reduce_fx", "mean")
    # A metric's value is computed from all rows.
    of_metric = isinstance(value, CallTarget | CallResult)
    if reduction not in ("mean", torch.mean) and not of_metric:
        raise SpmdZeroUsageError(
            f"self.log({name!r}, reduce_fx={reduction!r}) in a step: what a step logs is the mean "
            "over the devices, which of their sums or maxima is another number. Return the value "
            "of each row from the step, reduce it in on_train_batch_end (or "
            "on_validation_batch_end), and log it there"
        )

    def scalar(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() != 1:
            raise ValueError(
                f"self.log({name!r}, ...) was called with a tensor {list(tensor.shape)}, but it "
                "must have a single element. You can try its .mean()"
            )
        return (tensor if graph else tensor.detach()).reshape(())

    calls.note("", "log", name, map_tensors(value, scalar), **options)


def _log_dict(
    module: LightningModule, calls: RecordedCalls, dictionary: Any, *args: Any, **kwargs: Any
) -> None:
    """`LightningModule.log_dict` inside of a step."""
    if not isinstance(dictionary, Mapping):
        calls.note("", "log_dict", dictionary, *args, **kwargs)
        return
    given = inspect.signature(LightningModule.log_dict).bind(module, dictionary, *args, **kwargs)
    options = {k: v for k, v in given.arguments.items() if k not in ("self", "dictionary")}
    for name, value in dictionary.items():
        _log(module, calls, name, value, **options)


def _refuse_gather(*_: Any, **__: Any) -> NoReturn:
    raise SpmdZeroUsageError(
        "self.all_gather(...) inside of a step: there each device has its own rows, and nothing "
        "crosses between them. Return the tensor from the step: on_train_batch_end and its like "
        "get the rows of all devices"
    )


def _given(replicas: int, call: Call) -> Call:
    """The call to make: a metric gets values on the host, other targets get deferred tensors.

    Args:
        replicas: number of replicas that shared the rows; a step's `batch_size` counts its own
            rows.
        call: the recorded call.
    """

    def convert(_: str, tensor: Any) -> Any:
        if not isinstance(tensor, DeferredTensor):
            return tensor
        if call.target and call.method != "append":
            return tensor.cpu().detach()
        return DeferredTensor(tensor._value, computes=True)

    args, kwargs = map_tensors((call.args, call.kwargs), convert)
    if not call.target and kwargs.get("batch_size") is not None:
        kwargs = {**kwargs, "batch_size": kwargs["batch_size"] * replicas}
    return dataclasses.replace(call, args=args, kwargs=kwargs)


@contextlib.contextmanager
def values_in(places: list[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Sets `place[key]` to `value` inside the context, for each; existing keys keep their order."""
    before = [(place, key, key in place, place.get(key)) for place, key, _ in places]
    for place, key, value in places:
        place[key] = value
    try:
        yield
    finally:
        for (place, key, was_there, earlier), (_, _, value) in zip(before, places, strict=True):
            if place.get(key) is not value:
                # The user's code assigned a new value meanwhile.
                continue
            if was_there:
                place[key] = earlier
            else:
                del place[key]


def _takes_any(step: Callable[..., Any]) -> bool:
    parameters = inspect.signature(step).parameters.values()
    return any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _reads_parameter(step: Callable[..., Any], name: str) -> bool:
    """Whether the code of `step` may read the parameter `name`; True if that can't be known."""
    code = getattr(getattr(step, "__func__", step), "__code__", None)
    if code is None or name not in code.co_varnames or name in code.co_cellvars:
        return True
    if {"locals", "vars", "eval", "exec"} & set(code.co_names):
        return True
    loads = [i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD")]
    return any(name == argval or (isinstance(argval, tuple) and name in argval) for argval in loads)
