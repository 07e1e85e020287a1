"""Counts the matrix products of a forward, by torch's own operations."""

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

from spmdzero._dispatch_mode import DispatchMode
from spmdzero.backend._current import arrays
from spmdzero.backend.forms._tree import found
from spmdzero.backend.forms._work import Product, Work, counting

# Operation -> the places of its product's two operands, where torch has a formula for it
# (`torch.utils.flop_counter`).
_PLACES = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm", "convolution", "_convolution"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm"), (1, 2)),
}
# Part of an operation's name -> it may multiply matrices. Where the operation is in none of the
# tables of this file, nothing is known of its arithmetic.
_MAY_MULTIPLY = re.compile(
    r"(?:^|_)(?:\w*mm|\w*conv\w*|linalg|matmul|linear|lstm|gru|rnn|attention|cholesky|solve|lu"
    r"|lstsq|svd|qr|cdist|euclidean|trilinear|inner|\w*dot|\w*mv|ormqr|inverse)(?:_|$)"
)
_MULTIPLIES_NOTHING = re.compile(
    r"^(?:upsample_\w+|linalg_(?:vector_norm|cross|diagonal|check_errors)|_linalg_check_errors"
    r"|nll_loss\w*|_thnn_fused_(?:lstm|gru)_cell|slice_inverse)$"
)
# Namespaces of operations that only move, or that torch itself takes apart.
_OF_TORCH = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler")


class WorkCounter(DispatchMode):
    """A dispatch mode that counts a forward, and the backward that it has to have.

    Convention. A forward's products count as they are written, 2 operations a multiplication. A
    backward has one product of the same size for each operand that needs a gradient: two for a
    trained weight behind other trained ones, one where the weight is frozen (LoRA) or where the
    input is data, none under `torch.no_grad`. So a model that is trained whole counts three
    forwards (PaLM, arXiv 2204.02311, appendix B). Nothing that is computed again counts. Of causal
    attention half of the pairs count, of a window those in it (`backend/attention/_products.py`).

    The functions of a `torch.autograd.Function` run below autograd: their products count as if
    autograd itself differentiated them.

    Args:
        share: the part of one device in what is counted.
    """

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self._share, self._flops = share, 0.0
        self._unknown: dict[str, None] = {}
        self._quiet = 0
        # Of the autograd functions that run, one in another: whether autograd records the call.
        self._functions: list[bool] = []
        # What these have computed from tensors that need a gradient; ids, as tensors compare.
        self._needing: dict[int, weakref.ref[torch.Tensor]] = {}

    @property
    def work(self) -> Work:
        """The arithmetic that was counted so far."""
        return Work(flops=self._flops * self._share, unknown=tuple(self._unknown))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context around a whole forward, with what the backend puts around it.

        The mode itself is entered innermost, where the model's operations are still its own.
        """
        # Scripts call functions by a reference to `apply`, which asks its class for this one.
        applied = classmethod(self._applied)
        with counting(self):
            # torch's class inherits its own from C++.
            _SingleLevelFunction.apply = applied  # type: ignore[bad-assignment]
            try:
                yield
            finally:
                del _SingleLevelFunction.apply

    @contextlib.contextmanager
    def counted_as(self, *products: Product) -> Iterator[None]:
        """Context in which operations count as `products`."""
        if not self._quiet:
            for product in products:
                self._add(product)
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation, and counts it."""
        made = func(*args, **kwargs)
        if self._quiet:
            return made
        given = found((args, kwargs), torch.Tensor)
        if any(map(arrays.is_mine, given)):
            self._count(func, args, kwargs, made)
            if self._functions and any(map(self._needs, given)):
                self._note_needing(made)
        return made

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        product = product_of(func, args, kwargs, made)
        if isinstance(product, Product):
            self._add(product)
        elif product is not None:
            self._unknown[product] = None

    def _add(self, product: Product) -> None:
        gradients = sum(any(map(self._needs, tensors)) for tensors in product.operands)
        self._flops += (1 + gradients) * product.flops

    def _needs(self, tensor: torch.Tensor) -> bool:
        """Whether the backward has to compute the gradient of `tensor`."""
        if not self._records:
            return False
        known = self._needing.get(id(tensor))
        # A subclass of torch's tensors would run Python for the attribute.
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.requires_grad or (known is not None and known() is tensor)

    def _note_needing(self, made: Any) -> None:
        for tensor in found(made, torch.Tensor):
            if tensor.is_floating_point():
                self._needing[id(tensor)] = weakref.ref(tensor)

    @property
    def _applied(self) -> Callable[..., Any]:
        def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is CheckpointFunction:
                # Its forward runs below autograd, and counts as what it checkpoints.
                return args[0](*args[2:])
            self._functions.append(self._records)
            try:
                return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
            finally:
                self._functions.pop()

        return applied

    @property
    def _records(self) -> bool:
        """Whether autograd records what is computed now, or the function that computes it."""
        return self._functions[-1] if self._functions else torch.is_grad_enabled()


def product_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
) -> Product | str | None:
    """The product that an operation is; None if it is none, or why its arithmetic isn't known.

    Args:
        func: an operation, as a dispatch mode sees it.
        args, kwargs: its arguments.
        made: its result.
    """
    known = _known(func)
    return known(args, kwargs, made) if callable(known) else known


@functools.cache
def _known(func: Any) -> Callable[[Any, Any, Any], Product] | str | None:
    """How an operation's product follows from its arguments and its result, see `product_of`."""
    # It takes a tenth of a second to import.
    from torch.utils.flop_counter import flop_registry

    schema = getattr(func, "_schema", None)
    namespace, _, name = ("" if schema is None else schema.name).partition("::")
    # An operation in place does the same.
    name = name.removesuffix("_")
    if namespace == "aten" and name in _OWN:
        own = _OWN[name]
        return lambda args, kwargs, _: own(*args, **kwargs)
    if namespace == "aten" and name in _PLACES:
        formula, (one, other) = flop_registry[getattr(torch.ops.aten, name)], _PLACES[name]
        return lambda args, kwargs, made: Product(
            flops=float(formula(*args, **kwargs, out_val=made)),
            operands=((args[one],), (args[other],)),
        )
    if namespace not in _OF_TORCH:
        return f"{func} is no operation of torch's, and its arithmetic isn't known"
    if _MAY_MULTIPLY.search(name) and not _MULTIPLIES_NOTHING.search(name):
        return f"how much arithmetic {func} is isn't known"
    return None


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Product:
    return Product(flops=2.0 * x.numel() * weight.shape[0], operands=((x,), (weight,)))


def _of_vectors(one: torch.Tensor, other: torch.Tensor) -> Product:
    return Product(flops=2.0 * one.numel(), operands=((one,), (other,)))


def _addmv(_: Any, one: torch.Tensor, other: torch.Tensor, **__: Any) -> Product:
    return _of_vectors(one, other)


def _grouped(one: torch.Tensor, other: torch.Tensor, *_: Any, **__: Any) -> Product:
    # Each row of one operand meets one matrix, or where rows are summed up the other's row.
    if one.dim() == 3 and other.dim() == 2:
        flops = 2.0 * one.shape[1] * other.numel()
    else:
        flops = 2.0 * one.numel() * other.shape[-1]
    return Product(flops=flops, operands=((one,), (other,)))


def _convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *more: Any
) -> Product:
    """The products of a backward that runs; `more` has torch's other arguments, the mask last."""
    from torch.utils.flop_counter import conv_flop_count

    once = conv_flop_count([*x.shape], [*weight.shape], [*grad.shape], transposed=more[4])
    return Product(flops=float(once * sum(more[-1][:2])), operands=())


_OWN: dict[str, Callable[..., Product]] = {
    "convolution_backward": _convolution_backward,
    "linear": _linear,
    **dict.fromkeys(("dot", "vdot", "mv"), _of_vectors),
    "addmv": _addmv,
    "_grouped_mm": _grouped,
}
