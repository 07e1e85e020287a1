"""Attention of rows that the devices of a replica share over the mesh axis ``sequence``.

Each device gets whole rows, of some of the heads (DeepSpeed-Ulysses, arXiv 2309.14509): one
all-to-all for query, key and value, and one for what attention makes.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import torch

from spmdzero.backend.jax.axes._rows import divided
from spmdzero.backend.jax.graph._operations import MeshOp
from spmdzero.backend.jax.lazy._dispatch import own_value
from spmdzero.backend.jax.lazy._tensor import over
from spmdzero.backend.jax.lazy._values import Space, record
from spmdzero.backend.jax.mesh import DeviceMesh
from spmdzero.errors import ReplicaRegionError

# Dims of query, key, value and output, `[batch, heads, length, width]`.
_HEADS, _POSITIONS = 1, 2


class SharedRows:
    """Attention of rows that devices share: it gets them whole, with a part of the heads.

    Args:
        mesh: the devices, with an axis ``sequence``.

    Attributes:
        parts: number of devices that share a row.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self.parts = mesh, mesh.spec.sequence

    def attend(self, attention: Callable[..., Any], *tensors: torch.Tensor, **more: Any) -> Any:
        """The output of `attention`, as torch's, of query, key and value.

        Raises:
            ReplicaRegionError: the devices can't share the heads.
        """
        query, key, value = tensors
        if query.dim() != 4 or query.shape[_POSITIONS] % self.parts:
            return attention(query, key, value, **more)
        key, value = (self._repeated(each, query) for each in (key, value))
        query, key, value = self._with_whole_rows(query, key, value)
        grouped = key.shape[_HEADS] != query.shape[_HEADS]
        out = attention(query, key, value, **{**more, "enable_gqa": grouped})
        return self._moved(out, there=_POSITIONS, back=_HEADS)

    def _repeated(self, tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Keys or values of which each device gets whole heads, each so often as it has to be."""
        heads, own = query.shape[_HEADS], tensor.shape[_HEADS]
        times = next(
            (
                n
                for n in range(1, heads // own + 1)
                if own * n % self.parts == 0 == heads % (own * n)
            ),
            0,
        )
        if not times or heads % self.parts:
            raise ReplicaRegionError(
                f"attention of {heads} heads, and {own} of keys and values, on {self.parts} "
                "devices that share its rows: they can't share the heads. Choose a size of the "
                f"mesh axis sequence that divides {heads}"
            )
        return tensor if times == 1 else tensor.repeat_interleave(times, _HEADS)

    def _with_whole_rows(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Query, key and value with whole rows of each device's heads, which move together."""
        if len({tensor.shape[_POSITIONS:] for tensor in tensors}) > 1:
            return [self._moved(each, there=_HEADS, back=_POSITIONS) for each in tensors]
        # Heads by device: `[batch, devices, heads, length, width]`.
        apart = [tensor.unflatten(_HEADS, (self.parts, -1)) for tensor in tensors]
        joined = self._moved(torch.cat(apart, _HEADS + 1), there=_HEADS, back=_POSITIONS + 1)
        moved = joined.split([each.shape[_HEADS + 1] for each in apart], _HEADS + 1)
        return [each.flatten(_HEADS, _HEADS + 1) for each in moved]

    def _moved(self, tensor: torch.Tensor, *, there: int, back: int) -> torch.Tensor:
        return cast(torch.Tensor, _Moved.apply(self._divided, tensor, there, back))

    def _divided(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if tensor.shape[dim] % self.parts:
            return tensor
        devices = self._mesh.devices

        def function(array: jax.Array) -> jax.Array:
            return divided(array, dim, devices)

        op = MeshOp(("divided", dim, *self._mesh.key), function, Space.REPLICA, mesh=devices)
        form = (tuple(tensor.shape), tensor.dtype)
        return over(record(op, (own_value(tensor),), {}, [form])[0])


class _Moved(torch.autograd.Function):
    """Splits a tensor along another dim; its gradient arrives so, and goes back along the first."""

    @staticmethod
    def forward(
        ctx: Any, move: Callable[..., Any], tensor: torch.Tensor, there: int, back: int
    ) -> Any:
        ctx.move, ctx.there, ctx.back = move, there, back
        # Say both, or the compiler would split what is before by heads too, weights and all.
        return move(move(tensor, back), there)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        return None, ctx.move(ctx.move(grad, ctx.there), ctx.back), None, None
