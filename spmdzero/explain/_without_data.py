"""Batches of which only shapes are known, and models too large for memory, without values."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from spmdzero.backend import Placeholders, Replicated, lowering, map_tensors, runtime
from spmdzero.engine import (
    Engine,
    StepGraph,
    WorkCount,
    counting_work,
    find_loss,
    inputs_of,
)
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain._trace import Batch, TracedProgram
from spmdzero.profiling import backward_scopes, module_scopes

_Read = TypeVar("_Read")

# Largest number of CPU devices: XLA's CPU client numbers devices by process, and takes a device
# with a higher number for one of another process.
_MOST_ON_CPU = 2048


def made_up(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor with the same values at each call: normal draws, or zeros as valid indices."""
    if dtype.is_floating_point:
        generator = torch.Generator("cpu").manual_seed(0)
        return torch.randn(tuple(shape), generator=generator, device="cpu").to(dtype)
    return torch.zeros(tuple(shape), dtype=dtype, device="cpu")


def with_values(batch: Any) -> Any:
    """`batch` with a `made_up` tensor in place of each tensor on the meta device."""

    def fill(_: str, leaf: Any) -> Any:
        if isinstance(leaf, Replicated):
            return Replicated(fill(_, leaf.tensor))
        return made_up(leaf.shape, leaf.dtype) if leaf.is_meta else leaf

    return map_tensors(batch, fill)


class _StepTracedError(BaseException):
    """Ends a step before its program is compiled and run.

    It is no `Exception`: the engine keeps an observer's exceptions until the step is done.
    """


def is_without_data(model: nn.Module) -> bool:
    """Whether any parameter of `model` is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def check_runs_here(model: nn.Module, *, named: bool) -> None:
    """Refuses a model that can neither run on this process's devices nor be traced alone.

    Args:
        model: the model.
        named: whether TPU topologies are named for which it is compiled.

    Raises:
        SpmdZeroUsageError: the model is refused.
    """
    if is_without_data(model):
        if not named:
            raise SpmdZeroUsageError(
                "a model on the meta device is explained for a TPU, since nothing of it runs: name "
                'one, tpu=["v5p:4x4x4"], or build the model on the CPU'
            )
    elif runtime.device_count() > _MOST_ON_CPU and runtime.platform() == "CPU":
        raise SpmdZeroUsageError(
            f"{runtime.device_count():,} devices can't be virtual ones of this machine's CPU: XLA "
            f"runs at most {_MOST_ON_CPU:,}, and a model that has values is trained on them. Build "
            'it under torch.device("meta"), on the command line `spmdzero explain ... --meta`: it '
            "is then only traced and compiled"
        )


def bring_to_devices(model: nn.Module) -> None:
    """Moves a meta model to the devices in place, as zeros that are not computed yet."""
    runtime.start()
    for tensor in {*model.parameters(), *model.buffers()}:
        if tensor.is_meta:
            zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=runtime.device())
            if isinstance(tensor, nn.Parameter):
                zeros = nn.Parameter(zeros, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, zeros)


def trace_without_data(engine: Engine, batch: Batch) -> tuple[TracedProgram, ...]:
    """The programs of one step of an engine that was made while `tracing_only()` was on.

    Args:
        engine: the engine.
        batch: the inputs of one forward; the module returns the loss.
    """
    args, kwargs = inputs_of(batch)
    with (
        module_scopes(engine.module),
        backward_scopes(engine.module),
        counting_work() as count,
    ):
        traced = functools.partial(traced_program, engine=engine, count=count)
        return tuple(each_program(engine, args, kwargs, traced))


def traced_program(
    graph: StepGraph, runs: int, placeholders: Placeholders, *, engine: Engine, count: WorkCount
) -> TracedProgram:
    """A program that is about to be compiled.

    Args:
        graph: of the program.
        runs: number of its runs in a step.
        placeholders: what its inputs are.
        engine: whose step it is.
        count: what the forwards since the program before have counted.
    """
    outputs, work = list(graph.outputs.values()), count.take()
    program = placeholders.program(outputs)
    if engine._training.region is not None:
        # A global forward's operations can't be told from those outside, and there is a loss.
        work = work + placeholders.work_outside(outputs)
    return TracedProgram(
        kind=graph.kind,
        runs=runs,
        outputs=graph.returned,
        annotated=program,
        compiled=None,
        work=work,
    )


def each_program(
    engine: Engine,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    read: Callable[[StepGraph, int, Placeholders], _Read],
) -> Iterator[_Read]:
    """Yields what `read` makes of each program of one step.

    Args:
        engine: made while `tracing_only()` was on.
        args, kwargs: the inputs of one forward; the module returns the loss.
        read: takes a program that is about to be compiled, its number of runs in one step, and
            what its inputs are.
    """
    more = engine.gradient_accumulation_steps() - 1
    runs = {"micro": more, "boundary": 1} if more else {"boundary": 1}
    placeholders = lowering().placeholders()
    placeholders.stand_for(engine.named_tensors().values())
    for kind, count in runs.items():
        engine.set_gradient_accumulation_boundary(kind == "boundary")
        yield _trace(
            engine, args, kwargs, placeholders, lambda graph, n=count: read(graph, n, placeholders)
        )


def _trace(
    engine: Engine,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    placeholders: Placeholders,
    read: Callable[[StepGraph], _Read],
) -> _Read:
    found: list[_Read] = []

    def look(graph: StepGraph) -> None:
        found.append(read(graph))
        placeholders.stand_for(graph.outputs.values())
        raise _StepTracedError

    with engine.observe(look):
        try:
            engine.backward(find_loss(engine(*args, **kwargs)))
            engine.step()
        except _StepTracedError:
            pass
    return found[0]
