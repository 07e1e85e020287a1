"""Shapes: the views that torch makes, joining and repeating."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from spmdzero.backend.jax._versions import is_for_tpu
from spmdzero.backend.jax.axes._slice import sharing_axes
from spmdzero.backend.jax.ops._dtypes import cast, dtype_of, result_type
from spmdzero.backend.jax.ops._shapes import at, axes, axis, clipped, filled
from spmdzero.backend.jax.ops._table import lowers


@lowers("view", "_unsafe_view", "reshape", "view_copy", "_reshape_copy", "_reshape_alias")
def view(self: Any, size: Any, stride: Any = None) -> Any:
    """The elements in another shape; one of its sizes may be -1."""
    return self.reshape(filled(size, self.size))


@lowers("expand", "expand_copy")
def expand(self: Any, size: Any, implicit: bool = False) -> Any:
    """Dims of 1 repeated; -1 keeps a dim's size."""
    front = len(size) - self.ndim
    return jnp.broadcast_to(
        self, tuple(self.shape[i - front] if n == -1 else n for i, n in enumerate(size))
    )


@lowers("permute", "permute_copy")
def permute(self: Any, dims: Any) -> Any:
    """The dims in another order."""
    return jnp.transpose(self, tuple(axis(d, self.ndim) for d in dims))


@lowers("t", "t_copy")
def t(self: Any) -> Any:
    """The matrix transposed."""
    return self.T


@lowers("transpose.int", "transpose_copy.int")
def transpose(self: Any, dim0: int, dim1: int) -> Any:
    """Two dims exchanged."""
    if self.ndim == 4 and {axis(dim0, 4), axis(dim1, 4)} == {1, 2} and is_for_tpu():
        return _heads_exchanged(self)
    return jnp.swapaxes(self, dim0, dim1) if self.ndim else self


# Rows and columns of a tile of a TPU's memory, whatever the dtype.
_TILE = (8, 128)


def _heads_exchanged(self: Any) -> Any:
    """Dims 1 and 2 exchanged, as of heads and positions, for a TPU.

    Where each head is whole tiles wide, tiles of positions change places and stay as they are. So
    libtpu is told: of plain dims it makes other tiles, heads by width, and copies them back.
    """
    batch, first, second, size = self.shape
    at = 1 if first > second else 2
    if self.shape[at] % _TILE[0] or size % _TILE[1] or sharing_axes():
        return jnp.swapaxes(self, 1, 2)
    tiled = list(self.shape)
    tiled[at : at + 1] = [tiled[at] // _TILE[0], _TILE[0]]
    order = (0, 3, 1, 2, 4) if at == 1 else (0, 2, 3, 1, 4)
    return self.reshape(tiled).transpose(order).reshape(batch, second, first, size)


@lowers("select.int", "select_copy.int")
def select(self: Any, dim: int, index: int) -> Any:
    """The elements at one index of a dim, without that dim."""
    place = axis(dim, self.ndim)
    return lax.index_in_dim(self, index % self.shape[place], place, keepdims=False)


@lowers("slice.Tensor", "slice_copy.Tensor")
def slice_(
    self: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """A slice of a dim."""
    place = axis(dim, self.ndim)
    low, high = clipped(start, end, self.shape[place])
    return lax.slice_in_dim(self, low, high, step, place)


@lowers("narrow", "narrow_copy")
def narrow(self: Any, dim: int, start: int, length: int) -> Any:
    """The part of a dim with this start and length."""
    place = axis(dim, self.ndim)
    return lax.slice_in_dim(self, start, start + length, 1, place)


@lowers("unsqueeze", "unsqueeze_copy")
def unsqueeze(self: Any, dim: int) -> Any:
    """self with a new dim of 1."""
    return jnp.expand_dims(self, dim)


@lowers("squeeze", "squeeze.dim", "squeeze.dims")
@lowers("squeeze_copy", "squeeze_copy.dim", "squeeze_copy.dims")
def squeeze(self: Any, dim: Any = None) -> Any:
    """self without dims of 1, of all or of those given."""
    asked = range(self.ndim) if dim is None else (axes(dim, self.ndim) if dim != [] else ())
    return jnp.squeeze(self, tuple(d for d in asked if self.shape[d] == 1))


@lowers("diagonal", "diagonal_copy")
def diagonal(self: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """A diagonal of two dims, as the last dim."""
    return jnp.diagonal(self, offset, axis(dim1, self.ndim), axis(dim2, self.ndim))


@lowers("unfold", "unfold_copy")
def unfold(self: Any, dimension: int, size: int, step: int) -> Any:
    """Windows along a dim, with their elements as the last dim."""
    if self.ndim == 0:
        return self.reshape(1)[:size]
    place = axis(dimension, self.ndim)
    count = (self.shape[place] - size) // step + 1
    where = jnp.arange(count)[:, None] * step + jnp.arange(size)
    return jnp.moveaxis(self[at(place, self.ndim, where)], place + 1, -1)


@lowers("split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor")
def split(self: Any, split_size: int, dim: int = 0) -> list[Any]:
    """Parts of one size along a dim; the last may be smaller."""
    total = self.shape[axis(dim, self.ndim)]
    starts = range(0, total, split_size) if total else [0]
    return [slice_(self, dim, start, start + split_size) for start in starts]


@lowers("split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes")
def split_with_sizes(self: Any, split_sizes: Any, dim: int = 0) -> list[Any]:
    """Parts of these sizes along a dim."""
    parts, start = [], 0
    for size in split_sizes:
        parts.append(slice_(self, dim, start, start + size))
        start += size
    return parts


@lowers("unbind.int", "unbind_copy.int")
def unbind(self: Any, dim: int = 0) -> list[Any]:
    """The elements at every index of a dim."""
    return [select(self, dim, i) for i in range(self.shape[axis(dim, self.ndim)])]


@lowers("cat")
def cat(tensors: Any, dim: int = 0) -> Any:
    """The arrays joined along a dim; torch also allows empty ones of one dim among them."""
    dtype = result_type(*tensors)
    kept = [x for x in tensors if x.shape != (0,)] or tensors[:1]
    return jnp.concatenate([cast(x, dtype) for x in kept], axis(dim, kept[0].ndim))


@lowers("stack")
def stack(tensors: Any, dim: int = 0) -> Any:
    """The arrays along a new dim."""
    dtype = result_type(*tensors)
    return jnp.stack([cast(x, dtype) for x in tensors], axis(dim, tensors[0].ndim + 1))


@lowers("flip")
def flip(self: Any, dims: Any) -> Any:
    """self with the dims reversed."""
    return jnp.flip(self, tuple(axis(d, self.ndim) for d in dims)) if self.ndim else self


@lowers("roll")
def roll(self: Any, shifts: Any, dims: Any = ()) -> Any:
    """The elements shifted along dims, or as one sequence, cyclically."""
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    return jnp.roll(self, shifts, dims) if dims else jnp.roll(self, shifts[0])


@lowers("repeat")
def repeat(self: Any, repeats: Any) -> Any:
    """self repeated along each dim."""
    return jnp.tile(self, tuple(repeats))


@lowers("constant_pad_nd")
def constant_pad_nd(self: Any, pad: Any, value: Any = 0) -> Any:
    """Pads the ends of dims, the last dim first; negative numbers cut off."""
    pairs = [(pad[i], pad[i + 1], 0) for i in range(0, len(pad), 2)][::-1]
    config = [(0, 0, 0)] * (self.ndim - len(pairs)) + pairs
    return lax.pad(self, cast(value, dtype_of(self)), config)


@lowers("tril")
def tril(self: Any, diagonal: int = 0) -> Any:
    """self with 0 above the diagonal."""
    return jnp.tril(self, diagonal)


@lowers("triu")
def triu(self: Any, diagonal: int = 0) -> Any:
    """self with 0 below the diagonal."""
    return jnp.triu(self, diagonal)
