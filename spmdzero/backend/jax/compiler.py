"""Python made programs: see `spmdzero.backend.Compiler`."""

import contextlib
import dataclasses
import gc
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from spmdzero.backend._compiler import StandInKeptError
from spmdzero.backend.jax import _host, runtime
from spmdzero.backend.jax._cells import cells
from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._execute import Executable, compilations
from spmdzero.backend.jax._program import Folded, Graph, marked_spec
from spmdzero.backend.jax._tensor import LazyTensor, over
from spmdzero.backend.jax._values import Space, Value, latest_serial, record
from spmdzero.backend.jax._versions import wide_numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An array that a folded function reads beside its inputs.

    Attributes:
        tensor: over it.
        is_seed: whether it is the seed of the devices' own generator.
    """

    tensor: torch.Tensor
    is_seed: bool = False

    @property
    def handle(self) -> int:
        """Tells it apart from others."""
        return value_of(self.tensor).serial


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FoldedFunction:
    """A function of tensors, recorded once.

    Attributes:
        graph: what it computes.
        constants: what it reads beside its inputs.
    """

    graph: Graph
    constants: tuple[Constant, ...]
    # It holds the index of an input, or a constant, for each input of the graph.
    _arguments: tuple[int | torch.Tensor, ...]

    @property
    def proto(self) -> bytes:
        """Equal for functions that compute the same."""
        return self.graph.key

    @property
    def reads(self) -> frozenset[int]:
        """The inputs that it depends on."""
        return frozenset(a for a in self._arguments if isinstance(a, int))

    @property
    def arrangement(self) -> tuple[int | None, ...]:
        """For each input of the graph the index of one of the function's; None for a constant."""
        return tuple(a if isinstance(a, int) else None for a in self._arguments)

    def renumbered(self, moved: Mapping[int, int]) -> "FoldedFunction":
        """The function of inputs in another order: old index -> new, for those that it reads."""
        arguments = tuple(moved[a] if isinstance(a, int) else a for a in self._arguments)
        return dataclasses.replace(self, _arguments=arguments)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the function returns for `inputs`, pending."""
        given = self.given(inputs)
        forms = [(slot.shape, slot.dtype) for slot in self.graph.outputs]
        outputs = record(Folded(self.graph.key, self.graph), tuple(given), {}, forms)
        return [over(value) for value in outputs]

    def given(self, inputs: Sequence[torch.Tensor]) -> list[Value]:
        """The values of the graph's inputs."""
        return [value_of(inputs[a] if isinstance(a, int) else a) for a in self._arguments]

    def sharing(self, others: Sequence[Constant]) -> "FoldedFunction":
        """This function, which reads one of `others` where it has an equal constant of its own."""
        found = {
            id(own.tensor): other
            for own in self.constants
            for other in others
            if same_value(own.tensor, other.tensor)
        }
        return dataclasses.replace(
            self,
            constants=tuple(found.get(id(own.tensor), own) for own in self.constants),
            _arguments=tuple(
                found[id(a)].tensor if not isinstance(a, int) and id(a) in found else a
                for a in self._arguments
            ),
        )


def same_value(mine: torch.Tensor, its: torch.Tensor) -> bool:
    """Whether two tensors on the devices, both computed, are equal; NaN equals NaN."""
    if mine.shape != its.shape or mine.dtype != its.dtype:
        return False
    one, other = value_of(mine), value_of(its)
    if one is other:
        return True
    with wide_numbers():
        first, second = _host.gathered(one.array), _host.gathered(other.array)
    return bool(np.all((first == second) | ((first != first) & (second != second))))


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without data, for `fold`'s `more`: it can only be computed with."""
    return over(Value(shape, dtype, Space.GLOBAL, stand_in=True))


def fold(
    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    *,
    more: Sequence[torch.Tensor] = (),
) -> FoldedFunction:
    """Records `function` with stand-ins for `inputs`, which have their shapes and dtypes only.

    Args:
        function: pure: writes nothing that outlives it. Returns at least one tensor; what it
            returns is not an input.
        inputs: tensors like those of later calls.
        more: further inputs, of which `function` finds out only while it is recorded: it appends a
            `stand_in` for each.
    """
    empty = [stand_in(tensor.shape, tensor.dtype) for tensor in inputs]
    given = [value_of(tensor) for tensor in empty]
    outputs = function([over(value) for value in given])
    graph, leaves = Graph.of([value_of(output) for output in outputs])
    numbers = {id(value): index for index, value in enumerate(given)}
    numbers |= {id(value_of(tensor)): len(given) + i for i, tensor in enumerate(more)}
    constants = {id(v): Constant(over(v)) for v in leaves if id(v) not in numbers}
    return FoldedFunction(
        graph=graph,
        constants=tuple(constants.values()),
        _arguments=tuple(
            numbers[id(v)] if id(v) in numbers else constants[id(v)].tensor for v in leaves
        ),
    )


@contextlib.contextmanager
def no_stand_in_left() -> Iterator[None]:
    """Around code that calls `fold`: nothing that was computed from a stand-in outlives it.

    Raises:
        StandInKeptError: something had to be taken from somebody who kept it.
    """
    since = latest_serial()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    except BaseException as error:
        # Whoever keeps the error, as Jupyter does, would keep the frames that it came through.
        for frame, _ in traceback.walk_tb(error.__traceback__):
            _empty(frame)
        _let_go(since)
        raise
    else:
        if _let_go(since):
            raise StandInKeptError
    finally:
        if collects:
            gc.enable()


def _kept(since: int) -> bool:
    return any(cell.value.stand_in and cell.value.serial > since for cell in cells())


def _let_go(since: int) -> bool:
    if not _kept(since):
        return False
    gc.collect()
    if not _kept(since):
        return False
    for found in gc.get_objects():
        if not issubclass(type(found), LazyTensor):
            continue
        value = found.cell.value
        if value.stand_in and value.serial > since:
            found.cell.value = value_of(torch.zeros(value.shape, dtype=value.dtype, device="xla"))
    return True


def _empty(frame: types.FrameType) -> None:
    try:
        frame.clear()
    except RuntimeError:
        return  # running
    # Read once, the locals of a frame are kept as a dict, which reading them again empties.
    _ = frame.f_locals


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CompiledProgram:
    """A compiled program and how its inputs and outputs are arranged.

    Attributes:
        program: JAX's.
        inputs: for each input the index of a source, or an array.
        donated: numbers of the inputs whose memory is given away.
        outputs: for each output of the function its place among the program's.
        forms: a meta tensor like each.
    """

    program: Executable
    inputs: tuple[int | Any, ...]
    donated: tuple[int, ...]
    outputs: tuple[int, ...]
    forms: tuple[torch.Tensor, ...]

    def run(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Starts the program; what was donated of `sources` is gone afterwards."""
        values = [value_of(source) for source in sources]
        arrays = [values[i].array if isinstance(i, int) else i for i in self.inputs]
        for place in self.donated:
            index = self.inputs[place]
            assert isinstance(index, int)
            if values[index].holders > 1:
                # Somebody else holds the same memory, such as a tensor that was a copy of it.
                arrays[place] = arrays[place].copy()
        results = self.program.compiled(*arrays)
        made = []
        for place, form in zip(self.outputs, self.forms, strict=True):
            array = results[place]
            made.append(over(Value(form.shape, form.dtype, Space.GLOBAL, array=array), form))
        return made


def compile_alone(
    function: FoldedFunction,
    sources: Sequence[torch.Tensor],
    *,
    donated: Mapping[int, int],
    state: int,
) -> CompiledProgram:
    """Compiles `function` as a program that holds nothing else, unless it is compiled already.

    Args:
        function: folded.
        sources: what it is to be called with, none of it pending.
        donated: output -> the source whose memory it takes, of the same size.
        state: the first so many sources outlive the program, and share no memory.
    """
    arguments = function._arguments
    values = function.given(sources)
    place_of = {a: place for place, a in enumerate(arguments) if isinstance(a, int)}
    given = {output: place_of[source] for output, source in donated.items() if source in place_of}
    graph = function.graph
    # JAX gives the n-th of the donated inputs of one form to the n-th output of that form.
    count = len(graph.outputs)
    order = sorted(range(count), key=lambda index: given.get(index, len(arguments)))
    ordered = Graph(graph.inputs, tuple(graph.outputs[index] for index in order), graph.steps)
    shardings = marked_spec(ordered, compilations.mesh)
    for place, index in enumerate(order):
        if index in given:
            shardings[place] = values[given[index]].array.sharding
    numbers = tuple(sorted(given.values()))
    program = compilations.executable(
        ordered, [value.array for value in values], donated=numbers, shardings=shardings
    )
    return CompiledProgram(
        program=program,
        inputs=tuple(
            a if isinstance(a, int) else value.array
            for a, value in zip(arguments, values, strict=True)
        ),
        donated=numbers,
        outputs=tuple(order.index(index) for index in range(count)),
        forms=tuple(
            torch.empty(slot.shape, dtype=slot.dtype, device="meta") for slot in graph.outputs
        ),
    )


class Uploads(set[int]):
    """Serials of what was uploaded; `since` is that of the latest value before."""

    def __init__(self) -> None:
        super().__init__()
        self.since = latest_serial()


@contextlib.contextmanager
def record_uploads() -> Iterator[Uploads]:
    """Takes down each upload inside."""
    uploads = Uploads()
    _host.traffic.uploads.append(uploads)
    try:
        yield uploads
    finally:
        _host.traffic.uploads.remove(uploads)


def strangers(
    inputs: Sequence[Constant], uploads: Uploads, *, known: Collection[int] = ()
) -> list[Constant]:
    """Those constants of a folded function that may be something else when it runs again.

    Args:
        inputs: the constants.
        uploads: since the trace began.
        known: handles of others that are none.
    """
    return [c for c in inputs if c.is_seed or not (c.handle in known or c.handle in uploads)]


def start_pending(device: torch.device) -> None:
    """Starts what is recorded."""
    runtime.sync()
