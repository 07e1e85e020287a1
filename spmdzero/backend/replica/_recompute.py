"""Gradient checkpointing that XLA can't undo."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from spmdzero._dispatch_mode import DispatchMode
from spmdzero._logging import log_once
from spmdzero.backend._current import arrays, current, host_memory
from spmdzero.backend._named_states import NamedStates
from spmdzero.backend.forms._order import after
from spmdzero.backend.forms._said import as_said_of
from spmdzero.backend.forms._tree import map_tensors
from spmdzero.backend.replica import _keepers
from spmdzero.backend.replica._anchors import Anchors
from spmdzero.backend.replica._products import ANCHORS
from spmdzero.backend.replica._readers import in_region
from spmdzero.errors import ReplicaRegionError

UNTIED: Callable[..., Any] = inspect.unwrap(checkpoint)
"""torch's own function, whose second run the compiler merges with the first."""

_NOT_REENTRANT: Mapping[str, Any] = {"use_reentrant": False}


class _Tie(torch.autograd.Function):
    """`tensor` itself, as a value that can't be computed before `gradient` is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return after(tensor, gradient)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Fetch(torch.autograd.Function):
    """Copies a value from host memory to the devices once `gradient` is computed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return host_memory().from_host(tensor, gradient)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class Runs:
    """Values of a function's first run, which its later runs get again.

    torch's own selective checkpointing would return the very values of the first run, and XLA would
    merge the operations on them with those of that run.

    Attributes:
        gradient: the tensor to which values of this run are tied; None in the first run.
        are_first: whether none has ended yet.
    """

    def __init__(self) -> None:
        self._values: list[torch.Tensor] = []
        self._left: Iterator[torch.Tensor] | None = None
        self.gradient: torch.Tensor | None = None
        self.are_first = True

    def begin(self) -> None:
        """Begins a run; a graph that is kept has one in each backward pass."""
        # The run before may have ended early, once it had computed the missing values.
        self._left = None if self.are_first else iter(self._values)

    def end(self) -> None:
        """Ends a run."""
        self.are_first, self._left = False, None

    def kept(self, made: torch.Tensor, *, on_host: bool = False) -> torch.Tensor:
        """`made` in the first run; in a later run the result of the first run in its place."""
        if self._left is None:
            # What is written into the result later isn't kept. And the result itself leads to its
            # graph, which leads here: no collector sees that circle.
            held = arrays.apart(made)
            self._values.append(host_memory().to_host(held) if on_host else held)
            return made
        value = next(self._left, None)
        if value is None:
            raise ReplicaRegionError(
                "a checkpointed function computes something else when backward runs it again than "
                "it did before"
            )
        if on_host:
            value = host_memory().from_host(
                value, value if self.gradient is None else self.gradient
            )
        return arrays.apart(value) if self.gradient is None else after(value, self.gradient)


class Keeps(Protocol):
    """A keeper of a function that runs again, which each run enters once.

    Attributes:
        runs: has the kept values.
    """

    runs: Runs

    def __enter__(self) -> Any: ...

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None: ...


class KeepsProducts(DispatchMode):
    """Keeps the results of matrix products, convolutions and attention kernels.

    What is left to compute again is elementwise, or a sum over a row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs()

    def __enter__(self) -> "KeepsProducts":
        self.runs.begin()
        _keepers.enter(self)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        _keepers.leave()
        self.runs.end()

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation; the result of a product is kept."""
        made = func(*args, **kwargs)
        return self.runs.kept(made) if func in ANCHORS and _keepers.is_innermost(self) else made

    def of_kernel(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that replace the results of a kernel, which are kept."""
        return [self.runs.kept(value) for value in values]


def loop_body() -> Anchors | None:
    """The anchors of the loop whose body is traced, None where none is."""
    return _keepers.innermost_of(Anchors)


def recomputed(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Runs `function`, keeps only its inputs, and runs it again in the backward pass.

    torch.utils.checkpoint alone saves nothing under XLA: the second run has the same operations on
    the same values, so the compiler merges it with the first (common subexpression elimination)
    and keeps the activations; on the CPU its optimisation barriers are gone before that pass.
    Here the inputs of the second run depend on the arriving gradient, which the first doesn't know.

    Args:
        function: any differentiable function; runs twice, with the same random numbers.
        args, kwargs: its inputs; the tensors among them are kept.

    Returns what `function` returns.
    """
    if _offloads.depth:
        return recomputed_from_host(function, *args, **kwargs)
    return recomputed_but(None, function, args, kwargs)


def recomputed_from_host(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Does what `recomputed` does, and keeps the inputs in the host's memory until backward.

    It moves floating-point tensors of more than one element, in the replica region of a backend
    with `host_memory`. If nothing can be moved, a log line says why.
    """
    if loop_body() is not None:
        log_once(
            "what is checkpointed inside of a loop's block keeps nothing in host memory: the loop "
            "computes it again from what the block keeps"
        )
        return recomputed_but(None, function, args, kwargs)
    return recomputed_but(None, function, args, kwargs, on_host=can_rest_on_host())


def can_rest_on_host() -> bool:
    """Whether what runs again can keep values in the host's memory; a log line says why not."""
    if why := _why_it_stays():
        log_once(f"what checkpointed blocks keep stays where it is, not in host memory: {why}")
    can = in_region() and current().host_memory is not None
    return can and torch.is_grad_enabled()


def _why_it_stays() -> str:
    memory = current().host_memory
    if memory is None:
        return f"the {current().name} backend keeps what a program computes on the devices"
    if not in_region():
        return "it is computed outside of the replica region"
    return memory.missing()


def puts_inputs_on_host() -> bool:
    """Whether `kept_on_host` has what runs again keep its inputs in the host's memory."""
    return bool(_offloads.depth)


class _Offloads:
    depth = 0


_offloads = _Offloads()


@contextlib.contextmanager
def kept_on_host(enabled: bool) -> Iterator[None]:
    """Context in which `recomputed` does what `recomputed_from_host` does, if `enabled`."""
    _offloads.depth += enabled
    try:
        yield
    finally:
        _offloads.depth -= enabled


def recomputed_but(
    keeps: Keeps | None,
    function: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    *,
    on_host: bool = False,
    options: Mapping[str, Any] = _NOT_REENTRANT,
) -> Any:
    """Keeps, unlike `recomputed`, also what `keeps` takes note of.

    Args:
        keeps: a new one for each call; None keeps nothing else.
        function, args, kwargs: as for `recomputed`.
        on_host: whether the inputs are kept in the host's memory, which `can_rest_on_host` allows.
        options: of torch.utils.checkpoint.checkpoint.
    """
    arrived: list[torch.Tensor] = []
    # The first run computes with the values on the devices, later runs with those on the host.
    first = [(args, kwargs)] if on_host else []
    begun, runs = NamedStates.now(), itertools.count()

    def again(_: str, tensor: torch.Tensor) -> Any:
        if on_host and can_rest(tensor):
            gradient = arrived[-1] if arrived else tensor
            return _Tie.apply(_Fetch.apply(tensor, gradient), gradient)
        tied: Any = _Tie.apply(tensor, arrived[-1]) if arrived else tensor
        return as_said_of(tensor, tied)

    def run(named: dict[str, Any], *inputs: Any) -> Any:
        if keeps is not None:
            keeps.runs.gradient = arrays.inner(arrived[-1]) if arrived else None
        if first:
            inputs, named = first.pop()
        elif on_host or arrived:
            inputs, named = map_tensors((inputs, named), again)
        arrived.clear()
        drawn = begun.again() if next(runs) else contextlib.nullcontext()
        with drawn, keeps or contextlib.nullcontext():
            return function(*inputs, **named)

    def watch(_: str, tensor: torch.Tensor) -> torch.Tensor:
        # What stands for the output of a loop's block is a leaf; a hook would end the loop.
        with torch._C.DisableTorchFunctionSubclass():
            leaf = tensor.is_leaf
        if not leaf and arrays.is_mine(tensor):
            tensor.register_hook(arrived.append)
        return tensor

    if on_host:
        args, kwargs = map_tensors((args, kwargs), _at_rest)
    # As one argument: torch's checkpoint would take those named `debug` and the like for its own.
    return map_tensors(UNTIED(run, kwargs, *args, **options), watch)


def can_rest(tensor: torch.Tensor) -> bool:
    """Whether a value is one that rests in the host's memory where `can_rest_on_host`."""
    return arrays.is_mine(tensor) and tensor.is_floating_point() and tensor.numel() > 1


def _at_rest(_: str, tensor: torch.Tensor) -> torch.Tensor:
    if not can_rest(tensor):
        return tensor
    return host_memory().to_host(tensor.detach()).requires_grad_(tensor.requires_grad)
