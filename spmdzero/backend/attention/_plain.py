"""The kernels' computation in torch's operations, which is differentiable any number of times."""

import torch

from spmdzero.backend.attention._form import Form

# Below any product, but finite, because the difference of two infinities is NaN.
_UNSEEN = -0.7 * torch.finfo(torch.float32).max


def attention(
    form: Form, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """The output, `[batch, heads, q_length, value_dim]`; holds all weights at once.

    Args:
        form: the form of the tensors.
        q, k, v: as for the kernels, the query scaled.
        mask: as for the kernels.
    """
    group = form.heads // form.kv_heads
    with torch.autocast(q.device.type, enabled=False):
        queries = q.float().unflatten(1, (form.kv_heads, group))
        products = (queries @ k.float().unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
        seen = _seen(form, mask, q.device)
        if form.mask == "bias" and mask is not None:
            products = products + torch.where(seen, mask.float(), 0.0)
        weights = torch.where(seen, products, _UNSEEN).softmax(-1)
        # A query that sees no key has the output 0.
        weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)
        weights = weights.to(v.dtype).float().unflatten(1, (form.kv_heads, group))
        return (weights @ v.float().unsqueeze(2)).flatten(1, 2).to(q.dtype)


def _seen(form: Form, mask: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if mask is not None:
        return mask if form.mask == "bool" else mask > float("-inf")
    keys = torch.arange(form.kv_length, device=device)
    seen = (keys < form.kv_used)[None]
    if form.causal:
        seen = seen & (torch.arange(form.q_length, device=device)[:, None] >= keys)
    return seen
