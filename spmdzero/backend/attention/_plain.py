"""The kernels' computation in torch's operations, which is differentiable any number of times."""

import torch

from spmdzero.backend.attention._form import Form

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
