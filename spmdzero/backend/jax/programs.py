"""The text of programs, and the names in it: see `spmdzero.backend.Programs`."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from spmdzero.backend._programs import AnnotatedProgram
from spmdzero.backend.jax import arrays
from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._execute import compilations, donated_inputs
from spmdzero.backend.jax._graph import Graph
from spmdzero.backend.jax._program import marked_spec
from spmdzero.backend.jax._values import Scoped, Value
from spmdzero.backend.jax.ops import jax_dtype
from spmdzero.errors import SpmdZeroUsageError


def scope(name: str) -> contextlib.AbstractContextManager[None]:
    """What is computed inside carries `name` in the compiled program."""
    return Scoped(name)


def record_scopes(enabled: bool, *, by: Any) -> None:
    """Names are always recorded here: they are no part of a program's key, and cost nothing."""


def _lowered(tensors: Sequence[torch.Tensor]) -> Any:
    values = [value_of(tensor) for tensor in tensors]
    unique = list({id(value): value for value in values if value.node is not None}.values())
    graph, leaves = Graph.of(unique)
    shardings = marked_spec(graph, compilations.mesh)
    given = [_form(leaf) for leaf in leaves]
    donated = donated_inputs(graph, leaves, shardings)
    return compilations.lower(graph, given, donated=donated, shardings=shardings)


def _form(leaf: Value) -> Any:
    if leaf.array is not None:
        return leaf.array
    spec = PartitionSpec()
    return jax.ShapeDtypeStruct(
        leaf.shape, jax_dtype(leaf.dtype), sharding=NamedSharding(compilations.mesh, spec)
    )


def optimized_hlo(tensors: Sequence[torch.Tensor]) -> str:
    """The optimised, partitioned HLO of the program that computes `tensors`."""
    return _lowered(tensors).compile().as_text()


def annotated(tensors: Sequence[torch.Tensor]) -> AnnotatedProgram:
    """The program that computes `tensors`, as it is handed to the compiler."""
    module = _lowered(tensors).compiler_ir("hlo")
    return AnnotatedProgram(proto=module.as_serialized_hlo_module_proto())


def text(tensors: Sequence[torch.Tensor]) -> str:
    """That program as text; empty where nothing is left to compute."""
    pending = zip(tensors, arrays.are_pending(tensors), strict=True)
    roots = [tensor for tensor, pends in pending if pends]
    return _lowered(roots).as_text("hlo") if roots else ""


def placeholders() -> NoReturn:
    """Raises SpmdZeroUsageError: programs for TPUs are traced by the torch_xla backend."""
    raise SpmdZeroUsageError(
        "spmdzero explain traces with the torch_xla backend, and this process uses JAX's. Run it "
        "with SPMDZERO_BACKEND=torch_xla"
    )


def start_trace(folder: str | os.PathLike[str]) -> None:
    """Records what host and devices do, for TensorBoard and Perfetto.

    Raises:
        SpmdZeroUsageError: it is being recorded already.
    """
    try:
        jax.profiler.start_trace(folder)
    except RuntimeError as error:
        raise SpmdZeroUsageError(
            "a trace is being recorded already, and JAX records one at a time. End it first"
        ) from error


def stop_trace() -> None:
    """Writes it to ``<folder>/plugins/profile/<time>/``."""
    jax.profiler.stop_trace()
