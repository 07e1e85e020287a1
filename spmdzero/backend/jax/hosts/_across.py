"""Conversions between tensors of one host and tensors that all hosts share."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from spmdzero.backend.jax.graph._operations import MeshOp
from spmdzero.backend.jax.hosts import _own
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.lazy._tensor import over
from spmdzero.backend.jax.lazy._values import Space, Value, record


@dataclasses.dataclass(frozen=True)
class JaxAcross:
    """See `spmdzero.backend.Across`.

    Attributes:
        mesh: the devices of all hosts.
        hosts: the number of hosts.
    """

    mesh: jax.sharding.Mesh
    hosts: int

    def is_own(self, tensor: torch.Tensor) -> bool:
        """See `Across`."""
        return value_of(tensor).space is Space.HOST

    def own_rows(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """See `Across`."""
        value, shape = value_of(tensor), list(tensor.shape)
        shape[dim] //= self.hosts
        if dim == 0 and value.array is not None and self._is_kept_so(value, shape):
            return over(_shared(value, shape, Space.HOST))

        def own(array: jax.Array) -> jax.Array:
            return _own.rows_of(array, dim)

        return self._made(("own rows", dim), own, Space.HOST, value, shape)

    def all_rows(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """See `Across`."""
        value, shape = value_of(tensor), list(tensor.shape)
        if value.space is not Space.HOST:
            value = value_of(self._on_each_host(value))
        shape[dim] *= self.hosts
        if dim == 0 and value.array is not None:
            return over(_shared(value, shape, Space.GLOBAL))

        def whole(array: jax.Array) -> jax.Array:
            return _own.rows_of_all(array, dim)

        return self._made(("rows of all", dim), whole, Space.GLOBAL, value, shape)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Across`."""
        value = value_of(tensor)
        if value.space is not Space.HOST:
            return tensor
        return self._made(("mean of hosts",), _own.mean, Space.GLOBAL, value, value.shape)

    def _on_each_host(self, value: Value) -> torch.Tensor:
        def spread(array: jax.Array) -> jax.Array:
            return jax.numpy.broadcast_to(array, (self.hosts, *array.shape))

        return self._made(("on each host",), spread, Space.HOST, value, value.shape)

    def _is_kept_so(self, value: Value, shape: list[int]) -> bool:
        kept = _own.sharding(shape, self.mesh)
        return value.array.sharding.is_equivalent_to(kept, len(shape))

    @staticmethod
    def _made(
        key: Any, function: Callable[..., Any], space: Space, value: Value, shape: Sequence[int]
    ) -> torch.Tensor:
        op = MeshOp(key, function, space)
        return over(record(op, (value,), {}, [(shape, value.dtype)])[0])


def _shared(value: Value, shape: list[int], space: Space) -> Value:
    """The same array as a value of another space; neither value may be donated."""
    value.uploaded = True
    made = Value(shape, value.dtype, space, array=value.array)
    made.uploaded = True
    return made
