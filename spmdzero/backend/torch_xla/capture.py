"""A pending program taken down, to be started again without being traced.

torch_xla traces each operation in Python at each step. What it compiles stays in its cache, and
its bridge to dynamo shows the calls that start it with other inputs. The bridge donates only what
the user marks, and compiles what `sync` would compile again. Here a traced step is started by those
calls too, with the buffers of the state donated: one program is compiled for tracing and replaying,
and neither holds a state twice.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from spmdzero.backend.torch_xla import _private, runtime

# What a program reads first depends on its first root, so an order has to be looked at again.
_ORDERINGS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedProgram:
    """A compiled program and how its inputs and outputs are arranged.

    Attributes:
        program: its hash in torch_xla's cache.
        inputs: for each input its place among the sources that `run` is given; the constants
            follow them, and the seed of the device's generator follows those.
        constants: inputs that are the same at each run.
        sources: how many sources `run` takes.
        outputs: for each root that the program was made for its place among the outputs.
    """

    program: bytes
    inputs: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]
    sources: int
    outputs: tuple[int, ...]

    def run(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Starts the program; buffers of donated sources are gone afterwards.

        Args:
            sources: tensors that are not pending, of the shapes, dtypes and shardings that the
                program was compiled for.

        Returns a tensor for each root; the devices may still be computing them.

        Raises:
            ProgramLostError: torch_xla no longer has the program; nothing has changed.
        """
        device = runtime.device()
        pool = [*sources, *self.constants]
        if self._draws:
            pool.append(_private.seed_tensor(device))
        results = _private.run_compiled(self.program, [pool[place] for place in self.inputs])
        _private.advance_seed(device)
        return [results[place] for place in self.outputs]

    @property
    def _draws(self) -> bool:
        return self.sources + len(self.constants) in self.inputs


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProgramInput:
    """A buffer that a pending program reads.

    Attributes:
        handle: tells it apart from others.
        tensor: over the buffer.
        first_id: of the tensor that it was first read through; later tensors have higher ones.
    """

    handle: int
    tensor: torch.Tensor
    first_id: int

    @classmethod
    def over(cls, ids: Sequence[int], tensors: Sequence[torch.Tensor]) -> list["ProgramInput"]:
        """Of what `program_inputs` returns, without placeholders."""
        handles = _private.buffer_handles(tensors)
        return [
            cls(handle=handle, tensor=tensor, first_id=first_id)
            for first_id, tensor, handle in zip(ids, tensors, handles, strict=True)
        ]

    @property
    def is_seed(self) -> bool:
        """Whether it is the seed of the device's own generator."""
        return self.first_id == _private.seed_id()

    def is_number(self) -> bool:
        """Whether it is a Python number that torch_xla uploaded; may have to read it."""
        if self.tensor.dim():
            return False
        # torch_xla keeps the buffers of numbers, and finds them again by value.
        zero = torch.zeros((), dtype=self.tensor.dtype, device=self.tensor.device)
        _, found = _private.program_inputs([zero + self.tensor.item()])
        return self.handle in _private.buffer_handles(found)


class PendingProgram:
    """The program that is pending for `roots`.

    Args:
        roots: pending tensors.
        donated: root -> handle of its present buffer, for roots that the program writes in place.

    Attributes:
        inputs: what it reads, in its own order.
    """

    def __init__(
        self, roots: Sequence[torch.Tensor], *, donated: Mapping[torch.Tensor, int]
    ) -> None:
        ids, values = _private.program_inputs(roots)
        # The first look tells their ids; from then on they are known as the tensors of that look.
        first = {found.handle: found for found in ProgramInput.over(ids, values)}
        self._roots, values = _as_read(roots, values, donated)
        self.inputs = [
            dataclasses.replace(first[handle], tensor=value)
            for value, handle in zip(values, _private.buffer_handles(values), strict=True)
        ]
        given = set(donated.values())
        for found in self.inputs:
            if found.handle in given:
                _private.donate(found.tensor)
        names = _private.output_ids(self._roots)
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        by_id = {id(r): places[name] for r, name in zip(self._roots, names, strict=True)}
        self._outputs = tuple(by_id[id(root)] for root in roots)

    def run(self) -> list[torch.Tensor]:
        """Starts what `compile` compiled; returns a tensor for each root, to be put in its place.

        The roots are still pending, on buffers that are gone.

        Raises:
            ProgramLostError: torch_xla no longer has the program; the buffers are still there.
        """
        results = _private.run_compiled(self._program, [found.tensor for found in self.inputs])
        return [results[place] for place in self._outputs]

    def compile(self, feeds: Sequence[int | None], *, sources: int) -> CapturedProgram:
        """Compiles it, unless it is known.

        Args:
            feeds: for each input its place among the sources; None for one that is a constant,
                or the generator's seed.
            sources: how many there are.
        """
        constants = [
            found.tensor
            for found, place in zip(self.inputs, feeds, strict=True)
            if place is None and not found.is_seed
        ]
        following = iter(range(sources, sources + len(constants)))
        seed = sources + len(constants)
        inputs = [
            place if place is not None else seed if found.is_seed else next(following)
            for found, place in zip(self.inputs, feeds, strict=True)
        ]
        self._program = _private.compile_pending(self._roots)
        return CapturedProgram(
            program=self._program,
            inputs=tuple(inputs),
            constants=tuple(constants),
            sources=sources,
            outputs=self._outputs,
        )


def _as_read(
    roots: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    donated: Mapping[torch.Tensor, int],
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """The roots in the order in which their program reads what they are to take the place of.

    Takes the inputs of the roots' program, and returns those of the ordered roots' beside them.

    XLA gives the n-th of its donated buffers of one size to the n-th output of that size
    (`OptimizeInputOutputBufferAlias`). In any other order most outputs take the place of a buffer
    that is read after them, and all of the state is copied, twice.
    """
    for _ in range(_ORDERINGS):
        read = {handle: place for place, handle in enumerate(_private.buffer_handles(values))}
        places = [read.get(donated.get(root, -1), len(read)) for root in roots]
        if places == sorted(places):
            break
        pairs = zip(places, roots, strict=True)
        roots = [root for _, root in sorted(pairs, key=lambda pair: pair[0])]
        _, values = _private.program_inputs(roots)
    return roots, values
