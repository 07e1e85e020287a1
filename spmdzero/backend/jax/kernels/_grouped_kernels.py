"""Pallas kernels for products of groups of rows, each with a matrix of its own.

As MegaBlocks (arXiv 2211.15841) has them: a kernel visits each tile of rows once for each group
that has rows in it. libtpu 0.0.50 has such kernels of its own, before which it copies matrices that
are held transposed, as torch's models hold them: that takes three times as long as the products.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
_NN, _NT, _TN = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))
_ROWS = (128, 256, 512)
_LONGEST = 2048
# Bytes of blocks and sums, of 16 MiB that libtpu gives a kernel.
_MEMORY = 11 * 2**20
# Operations in the time of a byte of the memory: v5e's, and near v5p's.
_A_BYTE = 240


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """Decides which kernel it is.

    Attributes:
        rows: number of rows, of all groups.
        inner, outer: the lengths of a matrix: rows `[rows, inner]` become `[rows, outer]`.
        groups: number of matrices.
        dtype: ``"bfloat16"`` or ``"float32"``, of operands and result.
        transposed: whether a matrix is held as `[outer, inner]`.
        summed: whether the rows are summed up, to a matrix for each group.
        interpret: whether Pallas interprets the kernel, which then becomes plain HLO.
    """

    rows: int
    inner: int
    outer: int
    groups: int
    dtype: str
    transposed: bool = False
    summed: bool = False
    interpret: bool = False

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Lengths of blocks.

    Attributes:
        rows, inner, outer: of a block, along the dims of these names.
    """

    rows: int
    inner: int
    outer: int

    def visits(self, form: Form) -> int:
        """How many tiles of rows are visited at most; a group's ends may lie within one."""
        return -(-form.rows // self.rows) + form.groups

    def memory(self, form: Form) -> int:
        """Bytes of a core's memory, each block twice."""
        blocks = 2 * form.size * (
            self.rows * self.inner + self.inner * self.outer + self.rows * self.outer
        )  # fmt: skip
        # The sums; where rows are summed up, masked operands beside it.
        if form.summed:
            return blocks + 4 * (self.inner * self.outer + self.rows * (self.inner + self.outer))
        return blocks + 3 * 4 * self.rows * self.outer

    def bytes(self, form: Form) -> int:
        """Bytes that are read and written; a block that stays is not read again."""
        matrices = form.groups * form.inner * form.outer
        read = form.rows * form.inner * -(-form.outer // self.outer)
        if form.summed:
            read += form.rows * form.outer * -(-form.inner // self.inner)
            return form.size * (read + matrices)
        if self.inner < form.inner:
            matrices = self.visits(form) * form.inner * form.outer
        return form.size * (read + matrices + form.rows * form.outer)

    def cost(self, form: Form) -> float:
        """The larger of bytes, and of operations in the time of a byte."""
        operations = 2 * self.visits(form) * self.rows * form.inner * form.outer
        return max(self.bytes(form), operations / _A_BYTE)


@functools.cache
def tiles_of(form: Form) -> Tiles | None:
    """The quickest tiles that fit a core's memory; None if none do."""
    every = (
        Tiles(rows=rows, inner=inner, outer=outer)
        for rows, inner, outer in itertools.product(
            _ROWS, _parts(form.inner), _parts(form.outer)
        )
    )  # fmt: skip
    fitting = [tiles for tiles in every if tiles.memory(form) <= _MEMORY]
    return min(fitting, key=lambda tiles: tiles.cost(form), default=None)


def _parts(length: int) -> list[int]:
    """Lengths of blocks that divide `length` into whole lanes, or all of it."""
    lanes = range(LANES, min(length, _LONGEST) + 1, LANES)
    return sorted({length, *(part for part in lanes if length % part == 0)}, reverse=True)


def grouped(form: Form) -> Callable[..., tuple[Any, ...]]:
    """The function of rows, of matrices or other rows, and of each group's end, int32 `[groups]`.

    It returns the products `[rows, outer]`, 0 after the last group, or where rows are summed up
    `[groups, inner, outer]`.
    """
    return functools.partial(_summed if form.summed else _products, form)


def _products(form: Form, rows: Any, matrices: Any, ends: Any) -> tuple[Any]:
    tiles = _tiles(form)
    rows = _padded(rows, tiles.rows)
    # A last group without a matrix has the rows after all others.
    ends = jnp.append(ends, rows.shape[0]).astype(jnp.int32)
    visits = _visits(ends, rows.shape[0], tiles.rows, tiles.visits(form), empty=False)
    whole = form.inner // tiles.inner

    def matrix(n: Any, v: Any, k: Any, group: Any, *_: Any) -> tuple[Any, ...]:
        which = jnp.minimum(group[v], form.groups - 1)
        return (which, n, k) if form.transposed else (which, k, n)

    block = (tiles.outer, tiles.inner) if form.transposed else (tiles.inner, tiles.outer)
    made = _call(
        form, tiles, functools.partial(_multiply, form, whole),
        grid=(form.outer // tiles.outer, tiles.visits(form), whole),
        in_specs=[
            pl.BlockSpec((tiles.rows, tiles.inner), lambda n, v, k, group, tile, *_: (tile[v], k)),
            pl.BlockSpec((None, *block), matrix),
        ],
        out_specs=pl.BlockSpec(
            (tiles.rows, tiles.outer), lambda n, v, k, group, tile, *_: (tile[v], n)
        ),
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], form.outer), rows.dtype),
        scratch=(tiles.rows, tiles.outer),
    )(*visits, rows, matrices)  # fmt: skip
    return (made[: form.rows],)


def _multiply(
    form: Form, whole: int, group, tile, starts, ends, count, rows, matrix, out, total
) -> None:
    v, k = pl.program_id(1), pl.program_id(2)
    mine = group[v]

    @pl.when(k == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when((v < count[0]) & (mine < form.groups))
    def _() -> None:
        dims = _NT if form.transposed else _NN
        total[...] += _dot(rows[...], matrix[...], dims)

    @pl.when((v < count[0]) & (k == whole - 1))
    def _() -> None:
        is_first = (v == 0) | (tile[jnp.maximum(v - 1, 0)] != tile[v])
        own = _is_own(tile[v], starts[mine], ends[mine], out.shape)
        others = jnp.where(is_first, 0.0, out[...].astype(jnp.float32))
        out[...] = jnp.where(own, total[...], others).astype(out.dtype)


def _summed(form: Form, rows: Any, others: Any, ends: Any) -> tuple[Any]:
    tiles = _tiles(form)
    rows, others = _padded(rows, tiles.rows), _padded(others, tiles.rows)
    visits = _visits(
        ends.astype(jnp.int32), rows.shape[0], tiles.rows, tiles.visits(form), empty=True
    )
    made = _call(
        form, tiles, _sum_up,
        grid=(form.outer // tiles.outer, form.inner // tiles.inner, tiles.visits(form)),
        in_specs=[
            pl.BlockSpec((tiles.rows, tiles.inner), lambda n, k, v, group, tile, *_: (tile[v], k)),
            pl.BlockSpec((tiles.rows, tiles.outer), lambda n, k, v, group, tile, *_: (tile[v], n)),
        ],
        out_specs=pl.BlockSpec(
            (None, tiles.inner, tiles.outer), lambda n, k, v, group, *_: (group[v], k, n)
        ),
        out_shape=jax.ShapeDtypeStruct((form.groups, form.inner, form.outer), rows.dtype),
        scratch=(tiles.inner, tiles.outer),
    )(*visits, rows, others)  # fmt: skip
    return (made,)


def _sum_up(group, tile, starts, ends, count, rows, others, out, total) -> None:
    v, last = pl.program_id(2), count[0] - 1
    mine = group[v]

    @pl.when((v == 0) | (group[jnp.maximum(v - 1, 0)] != mine))
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when((v <= last) & (starts[mine] < ends[mine]))
    def _() -> None:
        def own(part: Any) -> Any:
            is_own = _is_own(tile[v], starts[mine], ends[mine], part.shape)
            return jnp.where(is_own, part[...].astype(jnp.float32), 0.0).astype(part.dtype)

        # Both are masked: a number of another group may be infinite.
        total[...] += _dot(own(rows), own(others), _TN)

    @pl.when((v == last) | ((v < last) & (group[jnp.minimum(v + 1, last)] != mine)))
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def _dot(one: Any, other: Any, dims: Any) -> Any:
    return jax.lax.dot_general(one, other, dims, preferred_element_type=jnp.float32)


def _is_own(tile: Any, start: Any, end: Any, shape: Sequence[int]) -> Any:
    """Marks a tile's rows that are of the group from `start` to `end`, in a block of this shape."""
    place = tile * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (place >= start) & (place < end)


def _visits(ends: Any, rows: int, tile: int, most: int, *, empty: bool) -> tuple[Any, ...]:
    """Group and tile of each visit, each group's start and end, and the number of visits.

    The visits are in the order of the groups; after the last it is repeated.

    Args:
        ends: of the groups.
        rows: number of rows, whole tiles.
        tile: rows in a tile.
        most: the length of the result.
        empty: whether a group without rows is visited too, once.
    """
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first = jnp.minimum(starts // tile, rows // tile - 1)
    counts = jnp.where(ends > starts, (ends - 1) // tile - first + 1, int(empty))
    until = jnp.cumsum(counts, dtype=jnp.int32)
    v = jnp.minimum(jnp.arange(most, dtype=jnp.int32), until[-1] - 1)
    group = jnp.sum(until[None] <= v[:, None], axis=1, dtype=jnp.int32)
    return group, first[group] + v - (until - counts)[group], starts, ends, until[-1:]


def _tiles(form: Form) -> Tiles:
    tiles = tiles_of(form)
    assert tiles is not None, form
    return tiles


def _padded(rows: Any, tile: int) -> Any:
    more = -rows.shape[0] % tile
    return jnp.pad(rows, ((0, more), (0, 0))) if more else rows


def _call(
    form: Form, tiles: Tiles, kernel: Any, *, scratch: Any, out_shape: Any, **grid: Any
) -> Any:
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5, scratch_shapes=[pltpu.VMEM(scratch, jnp.float32)], **grid
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
            if not form.summed
            else ("parallel", "parallel", "arbitrary")
        ),
        # Of the rows that there are: those that tiles have twice are left out.
        cost_estimate=pl.CostEstimate(
            flops=2 * form.rows * form.inner * form.outer,
            bytes_accessed=tiles.bytes(form),
            transcendentals=0,
        ),
        interpret=form.interpret,
        name="grouped_sums" if form.summed else "grouped_products",
    )
