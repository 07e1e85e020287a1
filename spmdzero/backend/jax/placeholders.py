"""Tracing without data, for programs of tensors that no memory here could hold."""

from collections.abc import Iterable, Sequence

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from spmdzero.backend.jax import arrays
from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._execute import compilations
from spmdzero.backend.jax._lowering import annotated
from spmdzero.backend.jax._values import Space, Value
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax._writes import write
from spmdzero.backend.jax.ops import jax_dtype
from spmdzero.backend.protocols._programs import AnnotatedProgram


class Placeholders:
    """Tensors without data, from which programs can be traced, but not run."""

    def stand_for(self, tensors: Iterable[torch.Tensor]) -> None:
        """Makes each tensor an input of later traces, sharded as its value was.

        Its pending operations are dropped.
        """
        for tensor in tensors:
            value = value_of(tensor)
            sharding = arrays.sharding_in_jax(value)
            if sharding is None:
                sharding = NamedSharding(compilations.mesh, PartitionSpec())
            with wide_numbers():
                form = jax.ShapeDtypeStruct(value.shape, jax_dtype(value.dtype), sharding=sharding)
            empty = Value(value.shape, value.dtype, Space.GLOBAL, array=form, stand_in=True)
            write(tensor, empty)

    def program(self, outputs: Sequence[torch.Tensor]) -> AnnotatedProgram:
        """The pending program that computes `outputs`."""
        return annotated(outputs)
