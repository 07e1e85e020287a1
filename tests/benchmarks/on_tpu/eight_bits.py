"""The products of a Llama block in JAX by hand, with operands of 16 or of 8 bits."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from on_tpu import folder

WIDTH, INNER, KEYS, TOKENS = 4096, 14336, 1024, 16384
"""Of Llama 3.1 8B, and the rows of a device."""
_MOST = {jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0, jnp.int8: 127.0}
_E4, _E5 = jnp.float8_e4m3fn, jnp.float8_e5m2
# What is multiplied forward, the gradient by the result, and whether each row has a scale.
_WAYS: dict[str, tuple[Any, Any, bool]] = {
    "fp8, tensorwise": (_E4, _E5, False),
    "fp8, rowwise": (_E4, _E4, True),
    "int8, tensorwise": (jnp.int8, jnp.int8, False),
    "int8, rowwise": (jnp.int8, jnp.int8, True),
}
WAYS = ("bf16", *_WAYS)


def measure(*, devices: int, root: str, way: str, requests: dict[str, Any]) -> dict[str, Any]:
    """Lowers forward and backward of the products, and keeps the program for each topology."""
    del devices  # All compute alike.
    block = functools.partial(_block, _linear(way))
    shapes = {
        "q": (WIDTH, WIDTH), "k": (WIDTH, KEYS), "v": (WIDTH, KEYS), "out": (WIDTH, WIDTH),
        "gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH),
    }  # fmt: skip

    def step(p: Any, x: jax.Array, by_y: jax.Array) -> Any:
        y, backward = jax.vjp(block, p, x)
        return y, backward(by_y)

    of = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    rows = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
    exported = jax.export.export(jax.jit(step), platforms=["tpu"])(of, rows, rows)
    return folder.keep_for_each(Path(root), exported.mlir_module().encode(), requests)


def _block(linear: Callable[[Any, Any], Any], p: Any, x: jax.Array) -> jax.Array:
    y = _normed(x)
    q, k, v = (linear(y, p[name]) for name in "qkv")
    # It stands for attention.
    x = x + linear(jnp.concatenate([k, v] * (WIDTH // (2 * KEYS)), 1) * q, p["out"])
    y = _normed(x)
    return x + linear(jax.nn.silu(linear(y, p["gate"])) * linear(y, p["up"]), p["down"])


def _normed(x: jax.Array) -> jax.Array:
    size = (x.astype(jnp.float32) ** 2).mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(size + 1e-5).astype(x.dtype)


def _linear(way: str) -> Callable[[Any, Any], Any]:
    if way == "bf16":
        return lambda x, w: x @ w
    forward, gradient, by_rows = _WAYS[way]

    def few(x: jax.Array, dtype: Any, dim: int) -> tuple[jax.Array, jax.Array]:
        along = dim if by_rows else None
        size = jnp.max(jnp.abs(x), along, keepdims=by_rows).astype(jnp.float32)
        scale = _MOST[dtype] / jnp.maximum(size, 1e-12)
        scaled = x.astype(jnp.float32) * scale
        scaled = jnp.round(scaled) if dtype is jnp.int8 else scaled
        return jnp.clip(scaled, -_MOST[dtype], _MOST[dtype]).astype(dtype), 1 / scale

    def product(one: Any, other: Any, dims: tuple[int, int]) -> jax.Array:
        (a, unit_a), (b, unit_b) = one, other
        wide = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
        made = jax.lax.dot_general(
            a, b, (((dims[0],), (dims[1],)), ((), ())), preferred_element_type=wide
        )
        if by_rows:
            unit_a, unit_b = unit_a.reshape(-1, 1), unit_b.reshape(1, -1)
        return (made * unit_a * unit_b).astype(jnp.bfloat16)

    @jax.custom_vjp
    def linear(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(few(x, forward, 1), few(w, forward, 0), (1, 0))

    def backward(kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w = kept
        by_x = product(few(g, gradient, 1), few(w, forward, 1), (1, 1))
        return by_x, product(few(x, forward, 0), few(g, gradient, 0), (0, 0))

    linear.defvjp(lambda x, w: (linear(x, w), (x, w)), backward)
    return linear
