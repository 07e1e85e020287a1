"""Gradient checkpointing that XLA can't undo."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from spmdzero._dispatch_mode import DispatchMode
from spmdzero._logging import log_once
from spmdzero.backend._current import arrays, current, host_memory
from spmdzero.backend._named_states import NamedStates
from spmdzero.backend.forms._order import after
from spmdzero.backend.forms._said import as_said_of
from spmdzero.backend.forms._tree import map_tensors
from spmdzero.backend.replica._anchors import Anchors
from spmdzero.backend.replica._products import PRODUCTS
from spmdzero.backend.replica._readers import in_region

UNTIED: Callable[..., Any] = inspect.unwrap(checkpoint)
"""torch's own function, whose second run the compiler merges with the first."""

_NOT_REENTRANT: Mapping[str, Any] = {"use_reentrant": False}
# Of torch's function; a script's own keyword arguments are those of what it checkpoints.
_OPTIONS = {*inspect.signature(UNTIED).parameters, "preserve_rng_state"} - {
    *("function", "args", "kwargs", "use_reentrant")
}


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


class _Kept(DispatchMode):
    """Keeps the results of products and attention kernels, and returns them again in later runs.

    Each run enters it once; a graph that is kept has a run in each backward pass. torch's own
    selective checkpointing would return the very values of the first run, and XLA would merge the
    operations on them with those of that run.

    Attributes:
        gradient: the tensor to which values of this run are tied; None in the first run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: list[torch.Tensor] = []
        self._left: Iterator[torch.Tensor] | None = None
        self.gradient: torch.Tensor | None = None
        self._first = True

    def __enter__(self) -> "_Kept":
        # The run before may have ended early, once it had computed the missing values.
        self._left = None if self._first else iter(self._values)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self._first, self._left = False, None
        super().__exit__(exc_type, exc_val, exc_tb)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation; the result of a product is kept."""
        made = func(*args, **kwargs)
        return self.keep(made) if func in PRODUCTS else made

    def keep(self, made: torch.Tensor) -> torch.Tensor:
        """`made` in the first run; in a later run the result of the first run in its place."""
        if self._left is None:
            # The result itself leads to its graph, which leads here: no collector sees that circle.
            self._values.append(made.detach())
            return made
        value = next(self._left)
        return value.detach() if self.gradient is None else after(value, self.gradient)


def is_loop_body() -> bool:
    """Whether the block that is traced becomes the body of a loop."""
    return any(isinstance(mode, Anchors) for mode in _get_current_dispatch_mode_stack())


def kept_of_kernel(made: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that replace the results of a kernel, which no dispatch mode sees."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Kept)]
    return [modes[-1].keep(value) for value in made] if modes else made


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
    return _recomputed(function, args, kwargs, kept=None)


def recomputed_from_host(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Does what `recomputed` does, and keeps the inputs in the host's memory until backward.

    It moves floating-point tensors of more than one element, in the replica region of a backend
    with `host_memory`. If nothing can be moved, a log line says why.
    """
    if why := _why_it_stays():
        log_once(f"what checkpointed blocks keep stays where it is, not in host memory: {why}")
    can = in_region() and not is_loop_body() and current().host_memory is not None
    return _recomputed(function, args, kwargs, kept=None, on_host=can and torch.is_grad_enabled())


def _why_it_stays() -> str:
    memory = current().host_memory
    if memory is None:
        return f"the {current().name} backend keeps what a program computes on the devices"
    if not in_region():
        return "it is computed outside of the replica region"
    return (
        "a loop over equal blocks stacks it on the devices" if is_loop_body() else memory.missing()
    )


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


def recomputed_but_dots(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Keeps, unlike `recomputed`, results of matrix products, convolutions and attention kernels.

    The second run takes these from the first and computes the rest, which is elementwise or a sum
    over a row.
    """
    return _recomputed(function, args, kwargs, kept=_Kept())


def recomputed_by_torch(
    function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any
) -> Any:
    """Does what torch.utils.checkpoint.checkpoint does, with the inputs tied as `recomputed` says.

    Raises what torch's function raises.
    """
    options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()}
    options["use_reentrant"] = use_reentrant
    if kwargs and use_reentrant is not False:
        return UNTIED(function, *args, **options, **kwargs)
    return _recomputed(function, args, kwargs, kept=None, options=options)


def _recomputed(
    function: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    *,
    kept: _Kept | None,
    on_host: bool = False,
    options: Mapping[str, Any] = _NOT_REENTRANT,
) -> Any:
    arrived: list[torch.Tensor] = []
    # The first run computes with the values on the devices, later runs with those on the host.
    first = [(args, kwargs)] if on_host else []
    begun, runs = NamedStates.now(), itertools.count()

    def again(_: str, tensor: torch.Tensor) -> Any:
        if on_host and _can_rest(tensor):
            gradient = arrived[-1] if arrived else tensor
            return _Tie.apply(_Fetch.apply(tensor, gradient), gradient)
        tied: Any = _Tie.apply(tensor, arrived[-1]) if arrived else tensor
        return as_said_of(tensor, tied)

    def run(named: dict[str, Any], *inputs: Any) -> Any:
        if kept is not None:
            kept.gradient = arrays.inner(arrived[-1]) if arrived else None
        if first:
            inputs, named = first.pop()
        elif on_host or arrived:
            inputs, named = map_tensors((inputs, named), again)
        arrived.clear()
        drawn = begun.again() if next(runs) else contextlib.nullcontext()
        with drawn, kept or contextlib.nullcontext():
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


def _can_rest(tensor: torch.Tensor) -> bool:
    return arrays.is_mine(tensor) and tensor.is_floating_point() and tensor.numel() > 1


def _at_rest(_: str, tensor: torch.Tensor) -> torch.Tensor:
    if not _can_rest(tensor):
        return tensor
    return host_memory().to_host(tensor.detach()).requires_grad_(tensor.requires_grad)
