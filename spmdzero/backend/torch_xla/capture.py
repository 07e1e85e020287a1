"""Compiling a folded function as a program of its own, which starts without being traced.

torch_xla traces each operation in Python at each step. Its compiled programs stay in its cache, and
its bridge to dynamo has calls that start them with other inputs. The bridge donates only buffers
that the user marks. Here the state's buffers are donated, so that no state is held twice.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from spmdzero.backend.protocols._compiler import FoldedFunction
from spmdzero.backend.torch_xla import _private, runtime
from spmdzero.backend.torch_xla.fixed_values import ProgramInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedProgram:
    """A compiled program and the arrangement of its inputs and outputs.

    Attributes:
        program: its hash in torch_xla's cache.
        inputs: for each input its index among the sources of `run`, the constants after them, and
            the seed of the device's generator at the end.
        constants: inputs that are the same at each run.
        sources: number of sources that `run` takes.
        outputs: for each output of the function its index among the program's outputs.
    """

    program: bytes
    inputs: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]
    sources: int
    outputs: tuple[int, ...]

    def run(
        self, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Starts the program; buffers of donated sources are gone afterwards.

        Args:
            sources: computed tensors, of the shapes, dtypes and shardings that the program was
                compiled for.
            into: for each output of the function the tensor that takes it, or None for a new one.

        Returns the function's outputs; the devices may still be computing them.

        Raises:
            ProgramLostError: torch_xla no longer has the program; nothing has changed.
        """
        device = runtime.device()
        pool = [*sources, *self.constants]
        if self.sources + len(self.constants) in self.inputs:
            pool.append(_private.seed_tensor(device))
        results = _private.run_compiled(self.program, [pool[place] for place in self.inputs])
        _private.advance_seed(device)
        made = []
        for place, target in zip(self.outputs, into, strict=True):
            if target is not None:
                _private.set_value(target, results[place])
            made.append(results[place] if target is None else target)
        return made


def compile_alone(
    function: FoldedFunction,
    sources: Sequence[torch.Tensor],
    *,
    donated: Mapping[int, int],
    state: int,
) -> CapturedProgram:
    """Compiles `function` as a program of its own, unless it is compiled already.

    Args:
        function: a folded function.
        sources: the arguments of the first run, none of them pending.
        donated: output -> the source whose buffer the output takes, of the same size.
        state: the first `state` sources outlive the program, and share no buffer.
    """
    outputs = function(sources)
    given = set(donated.values())
    handles = _private.buffer_handles(sources)
    place_of = {handle: place for place, handle in enumerate(handles)}
    found = ProgramInput.of(outputs)
    read = {place_of[f.handle]: order for order, f in enumerate(found) if f.handle in place_of}
    # XLA gives the n-th of its donated buffers of one size to the n-th output of that size
    # (`OptimizeInputOutputBufferAlias`). In any other order most outputs take the place of a
    # buffer that is read after them, and all of the state is copied, twice.
    order = sorted(
        range(len(outputs)), key=lambda index: read.get(donated.get(index, -1), len(found))
    )
    for one in found:
        place = place_of.get(one.handle, state)
        if place in given:
            _private.donate(one.tensor)
        elif place < state:
            # From now on torch_xla knows the buffer by the other tensor.
            _private.set_value(sources[place], one.tensor)
    constants = [one for one in found if one.handle not in place_of and not _is_seed(one, function)]
    following = {id(one): len(sources) + place for place, one in enumerate(constants)}
    seed = len(sources) + len(constants)
    return CapturedProgram(
        program=_private.compile_pending([outputs[index] for index in order]),
        inputs=tuple(place_of.get(one.handle, following.get(id(one), seed)) for one in found),
        constants=tuple(one.tensor for one in constants),
        sources=len(sources),
        outputs=tuple(order.index(index) for index in range(len(outputs))),
    )


def _is_seed(found: ProgramInput, function: FoldedFunction) -> bool:
    return any(known.is_seed and known.handle == found.handle for known in function.constants)
