"""The kernels as operations of a traced program, with gradients of their own."""

import contextlib
import functools
import importlib.util
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from spmdzero.backend.replica._recompute import kept_of_kernel
from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla.attention._form import Form
from spmdzero.backend.torch_xla.scan import kept

_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.bool: "bool"}


@functools.cache
def has_jax() -> bool:
    """Whether the kernels' compiler is installed: the extra ``spmdzero[tpu]``."""
    return importlib.util.find_spec("jax") is not None


def dtype_name(dtype: torch.dtype) -> str | None:
    """As JAX names it; None for one that the kernels don't take."""
    return _DTYPES.get(dtype)


def run_kernels(form: Form, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention, differentiable by query, key and value.

    Args:
        form: of the tensors.
        tensors: query (scaled), key and value, `[batch, heads, length, width]`, and the mask.
    """
    return _Kernels.apply(form, *tensors)  # type: ignore[return-value]


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, *tensors: torch.Tensor) -> torch.Tensor:
        out, *statistics = _run("forward", form, tensors)
        ctx.form = form
        ctx.save_for_backward(*tensors, out, *statistics)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = _run("backward", ctx.form, (*ctx.saved_tensors, *grads))
        return (None, *gradients, *[None] * (ctx.form.mask is not None))


def _run(direction: str, form: Form, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    shapes = tuple((tuple(tensor.shape), _DTYPES[tensor.dtype]) for tensor in tensors)
    made = _private.call(_computation(direction, form, shapes), tensors)
    made = kept(kept_of_kernel(made)) if direction == "forward" else made
    # What torch_xla makes of a call isn't wrapped, and writes through its views would be lost.
    return [torch.ops.aten.lift_fresh.default(tensor) for tensor in made]


@functools.cache
def _computation(direction: str, form: Form, shapes: tuple[Any, ...]) -> Any:
    with _nothing_left():
        # They import jax, which is an extra.
        from spmdzero.backend.torch_xla.attention import _lowering, _masked, _splash

        kernels = _splash if form.mask is None else _masked
        function = functools.partial(getattr(kernels, direction), form)
        # `explain` leaves out the blocks that a causal mask hides.
        scope = f"attention.{direction}" + (".causal" if form.causal else "")
        lowered = _lowering.lowered(function, shapes, platform=form.platform, scope=scope)
        return _private.computation(lowered)


@contextlib.contextmanager
def _nothing_left() -> Iterator[None]:
    """Around what imports jax: generators and environment are afterwards what they were.

    In a forward, who watches Python's and NumPy's draws takes them for the model's. And jax sets
    TPU_SKIP_MDS_QUERY where there is no chip, after which Lightning ends in a TypeError of
    torch_xla's when it looks for one.
    """
    python, numpy = random.getstate(), np.random.get_state()
    before = dict(os.environ)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
