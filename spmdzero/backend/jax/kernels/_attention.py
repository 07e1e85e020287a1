"""Attention's kernels as recorded operations."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec

from spmdzero.backend.attention import Direction, Form, Kernels
from spmdzero.backend.jax.axes._slice import over_sharing, sharing_axes
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.lazy._tensor import over
from spmdzero.backend.jax.lazy._values import Space, record
from spmdzero.backend.replica._keepers import kept_of_kernel

Forms = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclasses.dataclass(frozen=True)
class AttentionOp:
    """The attention kernels of one form, in one direction.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        form: shapes, dtype and mask of query, key and value.
        makes: see `Op`.
    """

    direction: Direction
    form: Form
    makes: Space | None = None

    @property
    def key(self) -> Any:
        """See `Op`."""
        return ("attention", self.direction, self.form)

    @functools.cached_property
    def forms(self) -> Forms:
        """Shape and torch dtype of each result."""
        form = self.form
        rows, dtype = (form.batch, form.heads, form.q_length), getattr(torch, form.dtype)
        if self.direction == "forward":
            # For each query the logarithm of a sum; with a mask the sum and the largest score.
            statistics = 1 if form.mask is None else 2
            return ((*rows, form.value_dim), dtype), *[(rows, torch.float32)] * statistics
        keys = (form.batch, form.kv_heads, form.kv_length)
        widths = form.head_dim, form.value_dim
        sinks = [((1, form.heads, 1, 1), torch.float32)] * form.sinks
        made = (((*keys, width), dtype) for width in widths)
        return ((*rows, form.head_dim), dtype), *made, *sinks

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """The results as traced JAX arrays."""
        # `call` needs internals of JAX that differ between its versions.
        from spmdzero.backend.jax.kernels._kernels import call

        axes = sharing_axes()
        if not axes:
            return call(self.direction, self.form, self.forms, arrays)
        # The compiler can't divide a kernel: each device of a replica has its own heads.
        sizes = jax.sharding.get_abstract_mesh().shape
        own = AttentionOp(
            self.direction, _shared(self.form, math.prod(sizes[axis] for axis in axes))
        )
        split = own.form != self.form
        heads = PartitionSpec(None, axes) if split else PartitionSpec()
        specs = tuple(heads if array.shape[1] > 1 else PartitionSpec() for array in arrays)
        divided = over_sharing(
            lambda *mine: call(own.direction, own.form, own.forms, mine),
            axes,
            in_specs=specs,
            out_specs=[heads] * len(own.forms),
        )
        return divided(*arrays)


def _shared(form: Form, count: int) -> Form:
    """Returns what one of `count` devices computes: its heads; all where they don't divide."""
    if form.heads % count or form.kv_heads % count:
        return form
    mask = form.mask_shape
    if len(mask) > 1 and mask[1] > 1:
        mask = (mask[0], mask[1] // count, *mask[2:])
    return dataclasses.replace(
        form, heads=form.heads // count, kv_heads=form.kv_heads // count, mask_shape=mask
    )


def _run(direction: Direction, form: Form, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    op = AttentionOp(direction, form)
    values = tuple(value_of(tensor) for tensor in tensors)
    made = [*map(over, record(op, values, {}, op.forms))]
    return kept_of_kernel([*made]) if direction == "forward" else [*made]


KERNELS = Kernels(run=_run, install="pip install 'jax==0.7.1'")
