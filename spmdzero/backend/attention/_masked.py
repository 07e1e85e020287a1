"""Pallas kernels for attention whose mask is a tensor, boolean or added.

Flash attention (arXiv 2205.14135) in three kernels: the forward, the gradient of the query, and
those of key and value. A mask that is the same for all rows, heads or queries is read as it is,
never expanded. A query that sees no key has the output 0 and no gradient, as in torch. Blocks that
a causal mask or a window beside it hides are neither read nor computed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from spmdzero.backend.attention._form import LANES, Form

_NT = (((1,), (1,)), ((), ()))
_NN = (((1,), (0,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))
# Size of blocks: the products, their exponentials and an fp32 mask fit the memory beside them.
_BLOCK = 512


def _dot(one: Any, other: Any, dims: Any) -> Any:
    return jax.lax.dot_general(one, other, dims, preferred_element_type=jnp.float32)


def _scores(form: Form, at: tuple[Any, Any], q: Any, k: Any, mask: Any) -> tuple[Any, Any]:
    """The scores `[queries, keys]` of a block in fp32, and their slopes.

    A score is -inf where a query doesn't see a key. The slope is its derivative with respect to
    the product, which the cap changes.

    Args:
        form: of the attention.
        at: the numbers of the block of queries and of the block of keys.
        q, k, mask: what is read of them.
    """
    products, slopes = _dot(q, k, _NT), 1.0
    if form.soft_cap is not None:
        part = jnp.tanh(products / form.soft_cap)
        products, slopes = form.soft_cap * part, 1 - part * part
    if form.mask == "bias":
        products = products + mask.astype(jnp.float32)
    else:
        seen = jnp.broadcast_to(mask.astype(jnp.int32), products.shape) != 0
        products = jnp.where(seen, products, -jnp.inf)
    if form.causal or form.window is not None:
        queries, keys = (
            block * size + jax.lax.broadcasted_iota(jnp.int32, products.shape, dim)
            for dim, (block, size) in enumerate(zip(at, products.shape, strict=True))
        )
        products = jnp.where(_near(form, queries, keys, 1, 1), products, -jnp.inf)
    return products, slopes


def _near(form: Form, query: Any, key: Any, queries: int, keys: int) -> Any:
    """Whether any of `queries` from `query` on sees any of `keys` from `key` on."""
    seen = True
    if form.causal:
        seen = key < query + queries
    elif form.window is not None:
        seen = key - (query + queries - 1) < form.window
    if form.window is not None:
        seen = seen & (query - (key + keys - 1) < form.window)
    return seen


def _is_hidden(form: Form, at: tuple[Any, Any], q: Any, k: Any) -> Any:
    """Whether no query of a block sees any of its keys, whatever the mask says."""
    if not form.causal and form.window is None:
        return False
    queries, keys = q.shape[0], k.shape[0]
    return ~_near(form, at[0] * queries, at[1] * keys, queries, keys)


def _forward(form: Form, q, k, v, mask, out, largest, total, m, s, acc) -> None:
    block, blocks = pl.program_id(3), pl.num_programs(3)
    at = pl.program_id(2), block

    @pl.when(block == 0)
    def _() -> None:
        m[...] = jnp.full_like(m, -jnp.inf)
        s[...] = jnp.zeros_like(s)
        acc[...] = jnp.zeros_like(acc)

    @_unless(_is_hidden(form, at, q, k))
    def _() -> None:
        scores, _ = _scores(form, at, q[...], k[...], mask[...])
        before = m[:, :1]
        now = jnp.maximum(before, scores.max(axis=1, keepdims=True))
        # -inf minus -inf is NaN; while nothing was seen, everything is 0.
        finite = jnp.where(now == -jnp.inf, 0.0, now)
        weights = jnp.exp(scores - finite)
        shrunk = jnp.exp(before - finite)
        s[...] = shrunk * s[...] + weights.sum(axis=1, keepdims=True)
        acc[...] = shrunk * acc[...] + _dot(weights.astype(v.dtype), v[...], _NN)
        m[...] = jnp.broadcast_to(now, m.shape)

    @pl.when(block == blocks - 1)
    def _() -> None:
        seen = s[:, :1] > 0
        out[...] = (acc[...] / jnp.where(seen, s[:, :1], 1.0)).astype(out.dtype)
        # Where nothing was seen, these values make all weights exp(-inf), which is 0.
        largest[...] = jnp.where(seen, m[...], 0.0)
        total[...] = jnp.where(seen, s[...], 1.0)


def _unless(hidden: Any) -> Any:
    """Runs the decorated function at once, unless `hidden`, which may be a traced value."""
    return (lambda function: function()) if hidden is False else pl.when(~hidden)


def _of_block(form: Form, at: tuple[Any, Any], q, k, v, mask, largest, total, grad, di) -> Any:
    """The weights of a block, and the gradients of its products."""
    scores, slopes = _scores(form, at, q[...], k[...], mask[...])
    weights = jnp.exp(scores - largest[:, :1]) / total[:, :1]
    return weights, weights * (_dot(grad[...], v[...], _NT) - di[:, :1]) * slopes


def _backward_q(form: Form, q, k, v, mask, largest, total, grad, di, dq, acc) -> None:
    block, blocks = pl.program_id(3), pl.num_programs(3)
    at = pl.program_id(2), block

    @pl.when(block == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)

    @_unless(_is_hidden(form, at, q, k))
    def _() -> None:
        _, products = _of_block(form, at, q, k, v, mask, largest, total, grad, di)
        acc[...] += _dot(products.astype(k.dtype), k[...], _NN)

    @pl.when(block == blocks - 1)
    def _() -> None:
        dq[...] = acc[...].astype(dq.dtype)


def _backward_kv(
    form: Form,
    q,
    k,
    v,
    mask,
    largest,
    total,
    grad,
    di,
    dk,
    dv,
    acc_k,
    acc_v,
):
    head, block = pl.program_id(3), pl.program_id(4)
    at = block, pl.program_id(2)
    last = (head == pl.num_programs(3) - 1) & (block == pl.num_programs(4) - 1)

    @pl.when((head == 0) & (block == 0))
    def _() -> None:
        acc_k[...] = jnp.zeros_like(acc_k)
        acc_v[...] = jnp.zeros_like(acc_v)

    @_unless(_is_hidden(form, at, q, k))
    def _() -> None:
        weights, products = _of_block(form, at, q, k, v, mask, largest, total, grad, di)
        acc_k[...] += _dot(products.astype(q.dtype), q[...], _TN)
        acc_v[...] += _dot(weights.astype(grad.dtype), grad[...], _TN)

    @pl.when(last)
    def _() -> None:
        dk[...] = acc_k[...].astype(dk.dtype)
        dv[...] = acc_v[...].astype(dv.dtype)


class _Blocks:
    """The blocks of each operand, for a grid whose indices `at` turns into (b, h, kv h, i, j)."""

    def __init__(self, form: Form, at: Any) -> None:
        self.form, self.at = form, at
        self.q, self.kv = min(form.q_block, _BLOCK), min(form.kv_block, _BLOCK)

    def keys_seen(self, i: Any, j: Any) -> Any:
        """The block of keys j, or the nearest that queries i see: what stays isn't read again."""
        form, first, last = self.form, 0, self.form.kv_length // self.kv - 1
        start, end = i * self.q, i * self.q + self.q - 1
        if form.window is not None:
            first = jax.lax.div(jnp.maximum(start - form.window + 1, 0), self.kv)
        if form.causal:
            last = jnp.minimum(jax.lax.div(end, self.kv), last)
        elif form.window is not None:
            last = jnp.minimum(jax.lax.div(end + form.window - 1, self.kv), last)
        return jnp.clip(j, jnp.minimum(first, last), last)

    def queries_that_see(self, i: Any, j: Any) -> Any:
        """The block of queries i, or the nearest that see keys j."""
        form, first, last = self.form, 0, self.form.q_length // self.q - 1
        start, end = j * self.kv, j * self.kv + self.kv - 1
        if form.causal:
            first = jax.lax.div(start, self.q)
        elif form.window is not None:
            first = jax.lax.div(jnp.maximum(start - form.window + 1, 0), self.q)
        if form.window is not None:
            last = jnp.minimum(jax.lax.div(end + form.window - 1, self.q), last)
        return jnp.clip(i, jnp.minimum(first, last), last)

    def of_query(self, width: int) -> pl.BlockSpec:
        def index(*grid: Any) -> tuple[Any, ...]:
            b, h, _, i, _ = self.at(*grid)
            return b, h, i, 0

        return pl.BlockSpec((None, None, self.q, width), index)

    def of_key(self, width: int) -> pl.BlockSpec:
        def index(*grid: Any) -> tuple[Any, ...]:
            b, _, g, _, j = self.at(*grid)
            return b, g, j, 0

        return pl.BlockSpec((None, None, self.kv, width), index)

    def of_mask(self) -> pl.BlockSpec:
        rows, heads, queries, _ = self.form.mask_shape

        def index(*grid: Any) -> tuple[Any, ...]:
            b, h, _, i, j = self.at(*grid)
            return b * (rows > 1), h * (heads > 1), i * (queries > 1), j

        return pl.BlockSpec((None, None, self.q if queries > 1 else 1, self.kv), index)

    def inputs(self) -> list[pl.BlockSpec]:
        form = self.form
        key, value = self.of_key(form.head_dim), self.of_key(form.value_dim)
        return [self.of_query(form.head_dim), key, value, self.of_mask()]


def _call(form: Form, kernel: Any, **options: Any) -> Any:
    reduced = len(options["grid"]) - 3
    semantics = ("parallel",) * 3 + ("arbitrary",) * reduced
    return pl.pallas_call(
        functools.partial(kernel, form),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=form.interpret,
        name=f"attention{kernel.__name__}",
        **options,
    )


def _by_query(form: Form) -> tuple[_Blocks, tuple[int, ...]]:
    group = form.heads // form.kv_heads
    # For Python's division of possibly negative numbers, newer JAX asks for which TPU it is.
    blocks = _Blocks(
        form, lambda b, h, i, j: (b, h, jax.lax.div(h, group), i, blocks.keys_seen(i, j))
    )
    grid = (form.batch, form.heads, form.q_length // blocks.q, form.kv_length // blocks.kv)
    return blocks, grid


def forward(form: Form, q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, Any, Any]:
    """The output, and for each query the largest score and the sum of exponentials beside it."""
    blocks, grid = _by_query(form)
    per_query = (form.batch, form.heads, form.q_length)
    statistics = jax.ShapeDtypeStruct((*per_query, LANES), jnp.float32)
    out, largest, total = _call(
        form,
        _forward,
        grid=grid,
        in_specs=blocks.inputs(),
        out_specs=[blocks.of_query(form.value_dim), *[blocks.of_query(LANES)] * 2],
        out_shape=[jax.ShapeDtypeStruct((*per_query, form.value_dim), q.dtype), *[statistics] * 2],
        scratch_shapes=[
            pltpu.VMEM((blocks.q, LANES), jnp.float32),
            pltpu.VMEM((blocks.q, LANES), jnp.float32),
            pltpu.VMEM((blocks.q, form.value_dim), jnp.float32),
        ],
    )(q, k, v, _as_read(form, mask))
    return out, largest[..., 0], total[..., 0]


def backward(
    form: Form, q: Any, k: Any, v: Any, mask: Any, out: Any, largest: Any, total: Any, grad: Any
) -> tuple[Any, Any, Any]:
    """The gradients of query, key and value."""
    di = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=-1)
    wide = [jnp.broadcast_to(s[..., None], (*s.shape, LANES)) for s in (largest, total, di)]
    given = [q, k, v, _as_read(form, mask), wide[0], wide[1], grad, wide[2]]

    def specs(blocks: _Blocks) -> list[pl.BlockSpec]:
        statistics = blocks.of_query(LANES)
        grad = blocks.of_query(form.value_dim)
        return [*blocks.inputs(), statistics, statistics, grad, statistics]

    blocks, grid = _by_query(form)
    dq = _call(
        form,
        _backward_q,
        grid=grid,
        in_specs=specs(blocks),
        out_specs=blocks.of_query(form.head_dim),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[pltpu.VMEM((blocks.q, form.head_dim), jnp.float32)],
    )(*given)
    group = form.heads // form.kv_heads
    blocks = _Blocks(
        form,
        lambda b, g, j, h, i: (b, g * group + h, g, blocks.queries_that_see(i, j), j),
    )
    dk, dv = _call(
        form,
        _backward_kv,
        grid=(grid[0], form.kv_heads, grid[3], group, grid[2]),
        in_specs=specs(blocks),
        out_specs=[blocks.of_key(form.head_dim), blocks.of_key(form.value_dim)],
        out_shape=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in (k, v)],
        scratch_shapes=[
            pltpu.VMEM((blocks.kv, form.head_dim), jnp.float32),
            pltpu.VMEM((blocks.kv, form.value_dim), jnp.float32),
        ],
    )(*given)
    return dq, dk, dv


def _as_read(form: Form, mask: Any) -> Any:
    # 1-bit bools can't be split into blocks; a row of bytes for all queries has no tile.
    if form.mask == "bool":
        return mask.astype(jnp.int8 if form.mask_shape[2] > 1 else jnp.int32)
    return mask
