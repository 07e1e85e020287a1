"""Products of groups of rows, as of tokens sorted by experts, as a recorded operation."""

import dataclasses
from typing import Any

import jax
import torch

from spmdzero.backend.jax._versions import is_for_tpu
from spmdzero.backend.jax.axes._slice import sharing_axes
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.lazy._tensor import over
from spmdzero.backend.jax.lazy._values import Space, record
from spmdzero.backend.jax.ops import lowering

_FUNC: Any = getattr(torch.ops.aten, "_grouped_mm", None)


@dataclasses.dataclass(frozen=True)
class GroupedOp:
    """`torch._grouped_mm`; on a TPU Pallas kernels compute it inside the region.

    Attributes:
        transposed: whether the second operand is `[groups, outer, inner]`. The kernels read it so;
            libtpu's own would have it copied.
        makes: see `Op`.
    """

    transposed: bool = False
    makes: Space | None = None

    @property
    def key(self) -> Any:
        """See `Op`."""
        return ("grouped_mm", self.transposed)

    def __call__(self, one: jax.Array, other: jax.Array, ends: Any) -> jax.Array:
        """The result as a traced JAX array."""
        form = self._form(one, other, ends)
        if form is not None:
            # Its module needs internals of JAX that differ between its versions.
            from spmdzero.backend.jax.kernels._kernels import call_grouped

            return call_grouped(form, one.T if form.summed else one, other, ends)
        function: Any = lowering(_FUNC.default)
        return function(one, other.swapaxes(1, 2) if self.transposed else other, ends)

    def _form(self, one: Any, other: Any, ends: Any) -> Any:
        """The kernel's form; None where none computes this."""
        if one.ndim != 2 or ends is None or one.dtype not in ("bfloat16", "float32"):
            return None
        if not _is_within_a_region():
            return None
        from spmdzero.backend.jax.kernels._grouped_kernels import Form, tiles_of

        summed = other.ndim == 2
        rows, inner = one.shape[::-1] if summed else one.shape
        form = Form(
            rows=rows,
            inner=inner,
            outer=other.shape[1 if self.transposed or summed else 2],
            groups=ends.shape[0],
            dtype=str(one.dtype),
            transposed=self.transposed,
            summed=summed,
        )
        return None if tiles_of(form) is None else form


def _is_within_a_region() -> bool:
    """Whether the program is for TPUs, and each device has rows and all matrices of its own."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual
    divided = bool(mesh.axis_names) and all(kind is manual for kind in mesh.axis_types)
    return is_for_tpu() and divided and not sharing_axes()


def grouped_mm(
    tensor: torch.Tensor, mat2: torch.Tensor, offs: Any, like: torch.Tensor
) -> torch.Tensor:
    """Records the operation, whose result is like `like`."""
    # A view that only turns matrices over is undone.
    turned = tensor.dim() == 2 and mat2.dim() == 3 and mat2.stride(1) == 1 < mat2.stride(2)
    op = GroupedOp(transposed=turned)
    tensors = tensor, mat2.transpose(1, 2) if turned else mat2
    values = (*map(value_of, tensors), None if offs is None else value_of(offs))
    (made,) = record(op, values, {}, ((tuple(like.shape), like.dtype),))
    return over(made, like)
