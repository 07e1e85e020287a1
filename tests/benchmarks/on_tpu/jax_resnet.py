"""ResNet-50 in JAX."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from on_tpu.cases import Case

Weights = Mapping[str, jax.Array]
Shapes = dict[str, tuple[int, ...]]


def _blocks(case: Case) -> list[tuple[str, int, int, int]]:
    """Name, input channels, inner channels and stride of each bottleneck."""
    found, inputs = [], case.width
    for stage, count in enumerate(case.stages):
        inner = case.width * 2**stage
        for i in range(count):
            found.append((f"{stage}.{i}", inputs, inner, 2 if i == 0 and stage else 1))
            inputs = 4 * inner
    return found


def shapes(case: Case) -> tuple[Shapes, Shapes]:
    """Of the weights, and of the running means and variances."""
    weights: Shapes = {}
    statistics: Shapes = {}

    def conv(name: str, inputs: int, outputs: int, side: int) -> None:
        weights[name] = (outputs, inputs, side, side)
        for part in ("weight", "bias"):
            weights[f"{name}.{part}"] = (outputs,)
        for part in ("mean", "variance"):
            statistics[f"{name}.{part}"] = (outputs,)

    conv("first", 3, case.width, 7)
    outputs = case.width
    for name, inputs, inner, stride in _blocks(case):
        outputs = 4 * inner
        conv(f"{name}.1", inputs, inner, 1)
        conv(f"{name}.2", inner, inner, 3)
        conv(f"{name}.3", inner, outputs, 1)
        if stride > 1 or inputs != outputs:
            conv(f"{name}.short", inputs, outputs, 1)
    weights["head"], weights["head.bias"] = (outputs, case.vocabulary), (case.vocabulary,)
    return weights, statistics


def loss(case: Case, p: Weights, images: jax.Array, y: jax.Array) -> tuple[jax.Array, Weights]:
    """Images [rows, 3, pixels, pixels] -> the mean loss, and the batch's means and variances."""
    seen: dict[str, jax.Array] = {}

    def conv(name: str, x: jax.Array, stride: int = 1) -> jax.Array:
        pad = p[name].shape[-1] // 2
        made = jax.lax.conv_general_dilated(
            x, p[name], (stride, stride), [(pad, pad)] * 2,
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )  # fmt: skip
        wide = made.astype(jnp.float32)
        mean = wide.mean((0, 2, 3))
        variance = (wide**2).mean((0, 2, 3)) - mean**2
        seen[f"{name}.mean"], seen[f"{name}.variance"] = mean, variance
        scale = jax.lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"]
        shift = p[f"{name}.bias"] - mean * scale
        over = (..., None, None)
        return (wide * scale[over] + shift[over]).astype(made.dtype)

    x = jax.nn.relu(conv("first", images, 2))
    pads = [(0, 0), (0, 0), (1, 1), (1, 1)]
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), pads)
    for name, inputs, inner, stride in _blocks(case):
        z = jax.nn.relu(conv(f"{name}.1", x))
        z = conv(f"{name}.3", jax.nn.relu(conv(f"{name}.2", z, stride)))
        changes = stride > 1 or inputs != 4 * inner
        x = jax.nn.relu(z + (conv(f"{name}.short", x, stride) if changes else x))
    logits = (x.mean((2, 3)) @ p["head"] + p["head.bias"]).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, y[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean(), seen
