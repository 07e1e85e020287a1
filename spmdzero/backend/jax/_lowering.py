"""Lowers programs of tensors without compiling them."""

import io
from collections.abc import Sequence
from typing import Any

import torch

from spmdzero.backend.jax import runtime
from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._donation import Arranged, arranged
from spmdzero.backend.jax._execute import compilations
from spmdzero.backend.jax._values import Value
from spmdzero.backend.protocols._programs import AnnotatedProgram


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


def annotated(tensors: Sequence[torch.Tensor]) -> AnnotatedProgram:
    """The program that computes `tensors`, as the compiler receives it."""
    bytecode = io.BytesIO()
    # The bytecode has the lines and scopes of operations as the module has them.
    lowered(tensors).compiler_ir("stablehlo").operation.write_bytecode(bytecode)
    return AnnotatedProgram(module=bytecode.getvalue(), is_stablehlo=True)
