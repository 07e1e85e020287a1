"""The kernels as operations of a traced program, with their own gradients."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from spmdzero.backend.attention._form import Form
from spmdzero.backend.forms._with_graph import gradients_with_graph

# Below any product, but finite, because the difference of two infinities is NaN.
_UNSEEN = -0.7 * torch.finfo(torch.float32).max


def attention(
    form: Form,
    mask: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output, `[batch, heads, q_length, value_dim]`; holds all weights at once.

    Args:
        form: the form of the tensors.
        mask, q, k, v, sinks: as for the kernels, the query scaled.
    """
    group = form.heads // form.kv_heads
    with torch.autocast(q.device.type, enabled=False):
        queries = q.float().unflatten(1, (form.kv_heads, group))
        products = (queries @ k.float().unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
        if form.soft_cap is not None:
            products = form.soft_cap * (products / form.soft_cap).tanh()
        seen = _seen(form, mask, q.device)
        if form.mask == "bias" and mask is not None:
            products = products + torch.where(seen, mask.float(), 0.0)
        products = torch.where(seen, products, _UNSEEN)
        if sinks is not None:
            products = torch.cat((products, sinks.expand(*products.shape[:3], 1)), -1)
        weights = products.softmax(-1)[..., : form.kv_length]
        # A query that sees no key has the output 0.
        weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)
        weights = weights.to(v.dtype).float().unflatten(1, (form.kv_heads, group))
        return (weights @ v.float().unsqueeze(2)).flatten(1, 2).to(q.dtype)


def _seen(form: Form, mask: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    keys = torch.arange(form.kv_length, device=device)
    queries = torch.arange(form.q_length, device=device)[:, None]
    if mask is None:
        seen = (keys < form.kv_used)[None]
    else:
        seen = mask if form.mask == "bool" else mask > float("-inf")
    if form.causal:
        seen = seen & (queries >= keys)
    if form.window is not None:
        seen = seen & ((queries - keys).abs() < form.window)
    return seen


Direction = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """The way in which a backend runs the kernels.

    Attributes:
        run: computes a direction of a form. ``"forward"`` maps query, key, value, the mask and the
            sinks to the output and statistics. ``"backward"`` maps the same inputs, the results of
            ``"forward"`` and the output's gradient to the gradients of query, key, value and sinks.
            Results of the forward go through `kept_of_kernel`.
        install: the command that installs the package in which the kernels are written.
    """

    run: Callable[[Direction, Form, Sequence[torch.Tensor]], list[torch.Tensor]]
    install: str


def jax_function(direction: Direction, form: Form) -> Callable[..., tuple[Any, ...]]:
    """`Kernels.run` as a function of JAX's arrays; mask and sinks are missing where none are.

    It imports jax, which the torch_xla backend doesn't need.
    """
    if form.platform == "cuda":
        from spmdzero.backend.attention import _cudnn

        return functools.partial(getattr(_cudnn, direction), form)
    from spmdzero.backend.attention import _masked, _sinks, _splash

    kernels: Any = _splash if form.mask is None else _masked
    function = functools.partial(getattr(kernels, direction), form)
    return _sinks.around(function, direction, form) if form.sinks else function


def attend(kernels: Kernels, form: Form, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention, differentiable with respect to query, key, value and sinks.

    Args:
        kernels: those of the backend.
        form: the form of the tensors.
        tensors: query (scaled), key and value, `[batch, heads, length, width]`, the mask, and the
            sinks, `[1, heads, 1, 1]` in fp32.
    """
    return _Attention.apply(kernels, form, *tensors)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, form: Form, *tensors: torch.Tensor) -> torch.Tensor:
        out, *statistics = kernels.run("forward", form, tensors)
        ctx.kernels, ctx.form = kernels, form
        ctx.save_for_backward(*tensors, out, *statistics)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        no_mask = [None] * (ctx.form.mask is not None)
        if torch.is_grad_enabled():
            # The kernels can't compute a gradient of the gradient.
            q, k, v, *more = ctx.saved_tensors[: 3 + len(no_mask) + ctx.form.sinks]
            mask = more.pop(0) if no_mask else None
            plain = functools.partial(attention, ctx.form, mask)
            gradients = gradients_with_graph(plain, (q, k, v, *more), *grads)
        else:
            gradients = ctx.kernels.run("backward", ctx.form, (*ctx.saved_tensors, *grads))
        return (None, None, *gradients[:3], *no_mask, *gradients[3:])
