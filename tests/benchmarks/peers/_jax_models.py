"""The workload's models in JAX, on weights of torch's names and layouts."""

import math

import jax
import jax.numpy as jnp

Tree = dict[str, jax.Array]


def gpt_loss(
    p: Tree, tokens: jax.Array, targets: jax.Array, *, heads: int, layers: int, by_cudnn: bool
):
    """int32 [rows, sequence] twice -> mean loss; attention of 16-bit numbers by cuDNN if asked."""
    hidden = p["token.weight"][tokens] + p["position.weight"]
    rows, length, width = hidden.shape
    allowed = jnp.tril(jnp.ones((length, length), bool))
    for i in range(layers):
        name = f"blocks.{i}."
        qkv = _linear(p, name + "qkv", _norm(p, name + "norm_1", hidden))
        split = qkv.reshape(rows, length, 3, heads, width // heads)
        if by_cudnn:
            mixed = jax.nn.dot_product_attention(
                split[:, :, 0], split[:, :, 1], split[:, :, 2], is_causal=True,
                implementation="cudnn",
            )  # fmt: skip
        else:
            q, k, v = split.transpose(2, 0, 3, 1, 4)
            scores = q @ k.swapaxes(-1, -2) / math.sqrt(width // heads)
            weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), -1)
            mixed = (weights @ v).transpose(0, 2, 1, 3)
        hidden = hidden + _linear(p, name + "out", mixed.reshape(rows, length, width))
        up = _linear(p, name + "up", _norm(p, name + "norm_2", hidden))
        hidden = hidden + _linear(p, name + "down", jax.nn.gelu(up, approximate=False))
    return _cross_entropy(_norm(p, "norm", hidden) @ p["head.weight"].T, targets)


def cnn_loss(p: Tree, images: jax.Array, targets: jax.Array):
    """fp32 [rows, 3, pixels, pixels] and int32 [rows] -> mean loss."""
    x = images
    for i in (0, 3, 6, 9):
        x = jax.lax.conv_general_dilated(x, p[f"features.{i}.weight"], (2, 2), [(1, 1), (1, 1)])
        x = x + p[f"features.{i}.bias"][:, None, None]
        x = jax.nn.relu(_group_norm(p, f"features.{i + 1}", x, groups=8))
    return _cross_entropy(_linear(p, "head", x.mean((2, 3))), targets)


def _linear(p: Tree, name: str, x: jax.Array) -> jax.Array:
    return x @ p[name + ".weight"].T + p[name + ".bias"]


def _norm(p: Tree, name: str, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled.astype(x.dtype) * p[name + ".weight"] + p[name + ".bias"]


def _group_norm(p: Tree, name: str, x: jax.Array, *, groups: int) -> jax.Array:
    grouped = x.reshape(x.shape[0], groups, -1)
    centred = grouped - grouped.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    weight, bias = (p[f"{name}.{part}"][:, None, None] for part in ("weight", "bias"))
    return scaled.reshape(x.shape) * weight + bias


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logs, targets[..., None], -1).mean()
