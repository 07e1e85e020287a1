"""The workload's models in JAX, on weights of torch's names and layouts."""

import math

import jax
import jax.numpy as jnp

Tree = dict[str, jax.Array]


def gpt_loss(p: Tree, tokens: jax.Array, targets: jax.Array, *, heads: int, layers: int):
    """int32 [rows, sequence] twice -> mean loss."""
    hidden = p["token.weight"][tokens] + p["position.weight"]
    rows, length, width = hidden.shape
    allowed = jnp.tril(jnp.ones((length, length), bool))
    for i in range(layers):
        name = f"blocks.{i}."
        qkv = _linear(p, name + "qkv", _norm(p, name + "norm_1", hidden))
        split = qkv.reshape(rows, length, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
        scores = split[0] @ split[1].swapaxes(-1, -2) / math.sqrt(width // heads)
        mixed = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), -1) @ split[2]
        joined = mixed.transpose(0, 2, 1, 3).reshape(rows, length, width)
        hidden = hidden + _linear(p, name + "out", joined)
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
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * p[name + ".weight"] + p[name + ".bias"]


def _group_norm(p: Tree, name: str, x: jax.Array, *, groups: int) -> jax.Array:
    grouped = x.reshape(x.shape[0], groups, -1)
    centred = grouped - grouped.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    weight, bias = (p[f"{name}.{part}"][:, None, None] for part in ("weight", "bias"))
    return scaled.reshape(x.shape) * weight + bias


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, targets[..., None], -1).mean()
