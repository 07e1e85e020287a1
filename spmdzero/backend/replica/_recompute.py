"""Gradient checkpointing that XLA can't undo."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from spmdzero.backend._current import arrays
from spmdzero.backend.forms._order import after
from spmdzero.backend.forms._tree import map_tensors
from spmdzero.backend.replica._products import PRODUCTS


class _Tie(torch.autograd.Function):
    """`tensor` itself, as a value that can't be computed before `gradient` is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return after(tensor, gradient)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Kept(TorchDispatchMode):
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return self.keep(made) if func in PRODUCTS else made

    def keep(self, made: torch.Tensor) -> torch.Tensor:
        """`made` in the first run; in a later run the result of the first run in its place."""
        if self._left is None:
            self._values.append(made)
            return made
        value = next(self._left)
        return value if self.gradient is None else after(value, self.gradient)


def kept_of_kernel(made: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that replace the results of a kernel, which no dispatch mode sees."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Kept)]
    return [modes[-1].keep(value) for value in made] if modes else made


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
    return _recomputed(function, args, kwargs, kept=None)


def recomputed_but_dots(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `recomputed`, but keeps results of matrix products, convolutions and attention kernels.

    The second run takes these from the first and computes the rest, which is elementwise or a sum
    over a row.
    """
    return _recomputed(function, args, kwargs, kept=_Kept())


def _recomputed(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], *, kept: _Kept | None
) -> Any:
    arrived: list[torch.Tensor] = []
    ran = False

    def run(*inputs: Any, **named: Any) -> Any:
        nonlocal ran
        gradient = arrived.pop() if ran and arrived else None
        if gradient is not None:
            arrived.clear()
            inputs, named = map_tensors(
                (inputs, named), lambda _, tensor: _Tie.apply(tensor, gradient)
            )
        if kept is not None:
            kept.gradient = None if gradient is None else arrays.inner(gradient)
        ran = True
        if kept is None:
            return function(*inputs, **named)
        with kept:
            return function(*inputs, **named)

    def watch(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and arrays.is_mine(tensor):
            tensor.register_hook(arrived.append)
        return tensor

    return map_tensors(checkpoint(run, *args, use_reentrant=False, **kwargs), watch)
