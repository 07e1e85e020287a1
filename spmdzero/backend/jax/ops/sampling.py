"""Values of an image between its elements: `grid_sample`, in two and three dims."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from spmdzero.backend.jax.ops._dtypes import wide
from spmdzero.backend.jax.ops._table import lowers

_LINEAR, _NEAREST = 0, 1
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_A = -0.75


def _unnormalized(x: Any, length: int, align: bool) -> Any:
    return (x + 1) / 2 * (length - 1) if align else ((x + 1) * length - 1) / 2


def _clipped(x: Any, length: int) -> Any:
    # torch's gradient on the border itself is 0, where that of a clip would be a half.
    inside = (x > 0) & (x < length - 1)
    return jnp.where(inside, x, jax.lax.stop_gradient(jnp.clip(x, 0, length - 1)))


def _reflected(x: Any, length: int, align: bool) -> Any:
    low, span = (0.0, length - 1.0) if align else (-0.5, float(length))
    if span == 0:
        return jnp.zeros_like(x)
    x = x - low
    x = jnp.where(x < 0, -x, x)
    flips = jax.lax.stop_gradient(jnp.floor(x / span))
    rest = x - flips * span
    return jnp.where(flips % 2 == 0, rest, span - rest) + low


def _padded(x: Any, length: int, padding: int, align: bool) -> Any:
    """The coordinate in the image that stands for one outside."""
    if padding == _REFLECTION:
        x = _reflected(x, length, align)
    return x if padding == _ZEROS else _clipped(x, length)


def _taken(image: Any, places: Any) -> Any:
    """`[N, C, *out]`, the elements at integer coordinates `[N, *out]` of each dim; 0 outside."""
    lengths = image.shape[2:]
    inside: Any = True
    flat = 0
    for place, length in zip(places, lengths, strict=True):
        inside = inside & (place >= 0) & (place <= length - 1)
        flat = flat * length + jnp.clip(place, 0, length - 1).astype(jnp.int64)
    pixels = image.reshape(*image.shape[:2], -1)
    found = jax.vmap(lambda one, index: one[:, index])(pixels, flat)
    return jnp.where(inside[:, None], found, 0)


def _cubic_weights(t: Any) -> tuple[Any, ...]:
    def near(x: Any) -> Any:
        return ((_A + 2) * x - (_A + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A

    return far(t + 1), near(t), near(1 - t), far(2 - t)


def _sampled(image: Any, grid: Any, mode: int, padding: int, align: bool) -> Any:
    lengths = image.shape[2:]
    # The last dim of a grid has the coordinates of the image's dims in reverse order.
    at = [
        _unnormalized(grid[..., len(lengths) - 1 - d], length, align)
        for d, length in enumerate(lengths)
    ]
    if mode not in (_LINEAR, _NEAREST):
        return _cubic(image, at, padding, align)
    at = [_padded(x, length, padding, align) for x, length in zip(at, lengths, strict=True)]
    if mode == _NEAREST:
        return _taken(image, [jax.lax.stop_gradient(jnp.round(x)) for x in at])
    low = [jax.lax.stop_gradient(jnp.floor(x)) for x in at]
    total = 0
    for corner in itertools.product((0, 1), repeat=len(lengths)):
        weight: Any = 1
        for up, x, below in zip(corner, at, low, strict=True):
            weight = weight * ((x - below) if up else (below + 1 - x))
        places = [below + up for up, below in zip(corner, low, strict=True)]
        total = total + weight[:, None] * _taken(image, places)
    return total


def _cubic(image: Any, at: Any, padding: int, align: bool) -> Any:
    lengths = image.shape[2:]
    low = [jax.lax.stop_gradient(jnp.floor(x)) for x in at]
    weights = [_cubic_weights(x - below) for x, below in zip(at, low, strict=True)]
    total = 0
    for taps in itertools.product(range(4), repeat=len(lengths)):
        places: list[Any] = []
        weight: Any = 1
        for tap, below, length, of_dim in zip(taps, low, lengths, weights, strict=True):
            place = _padded(below + (tap - 1), length, padding, align)
            # A reflection about a half ends at an integer, up to rounding.
            places.append(jnp.trunc(place) if padding != _ZEROS else place)
            weight = weight * of_dim[tap]
        total = total + weight[:, None] * _taken(image, places)
    return total


@lowers("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback")
def grid_sampler(
    input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Any:
    """The image's values at the grid's coordinates; -1 and 1 are the image's borders."""
    return _sampled(wide(input), wide(grid), interpolation_mode, padding_mode, align_corners)


@lowers("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(
    grad_output: Any,
    input: Any,
    grid: Any,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Any,
) -> tuple[Any, Any]:
    """The gradients of image and grid for which the mask asks."""

    def forward(image: Any, where: Any) -> Any:
        return _sampled(image, where, interpolation_mode, padding_mode, align_corners)

    _, pull = jax.vjp(forward, wide(input), wide(grid))
    image, where = pull(wide(grad_output))
    return image if output_mask[0] else None, where if output_mask[1] else None
