"""Lowers programs of tensors without compiling them: see `spmdzero.backend.Lowering`."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from spmdzero.backend.jax import arrays, runtime
from spmdzero.backend.jax._versions import wide_numbers
from spmdzero.backend.jax.graph._donation import Arranged, arranged
from spmdzero.backend.jax.graph._execute import compilations
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.lazy._values import Space, Value
from spmdzero.backend.jax.lazy._writes import write
from spmdzero.backend.jax.ops import jax_dtype


def lowered(tensors: Sequence[torch.Tensor]) -> Any:
    """JAX's lowered program that computes `tensors`, for `runtime.program_platform`."""
    ready = _arranged(_pending(tensors))
    platform = runtime.program_platform()
    return compilations.lower(
        ready.graph,
        [leaf.array for leaf in ready.leaves],
        donated=ready.donated,
        shardings=ready.shardings,
        platform=None if platform == runtime.platform() else platform,
    )


def returned(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Indices of those of `tensors` that these programs return: pending ones, each once."""
    pending = _pending(tensors)
    places = list(pending)
    return [places[number] for number in _arranged(pending).order]


def _pending(tensors: Sequence[torch.Tensor]) -> dict[int, Value]:
    """Maps indices in `tensors` to pending values, each value once."""
    found: dict[int, tuple[int, Value]] = {}
    for place, value in enumerate(map(value_of, tensors)):
        if value.pending:
            found.setdefault(id(value), (place, value))
    return dict(found.values())


def _arranged(pending: dict[int, Value]) -> Arranged:
    return arranged([*pending.values()], compilations.mesh)


def annotated(tensors: Sequence[torch.Tensor]) -> bytes:
    """The program that computes `tensors`, as the compiler receives it."""
    bytecode = io.BytesIO()
    # The bytecode has the lines and scopes of operations as the module has them.
    lowered(tensors).compiler_ir("stablehlo").operation.write_bytecode(bytecode)
    return bytecode.getvalue()


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

    def program(self, outputs: Sequence[torch.Tensor]) -> bytes:
        """The pending program that computes `outputs`."""
        return annotated(outputs)


def placeholders() -> Placeholders:
    """A new `Placeholders`, which has no tensors yet."""
    return Placeholders()
