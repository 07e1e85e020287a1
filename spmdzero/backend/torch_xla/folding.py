"""A traced function that later programs hold as one operation.

torch_xla makes a node for each operation, in Python, at each step. A function that is folded is
traced once, lowered to HLO, and called: one node. The compiler inlines calls before it partitions
a program, so that annotations and collectives inside are those of the traced function.
"""

import contextlib
import dataclasses
import gc
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from spmdzero.backend._compiler import StandInKeptError
from spmdzero.backend.torch_xla import _private, runtime
from spmdzero.backend.torch_xla.mesh import fresh
from spmdzero.backend.torch_xla.strangers import ProgramInput


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FoldedFunction:
    """A function of tensors, lowered.

    Attributes:
        proto: its HLO module, serialised.
        constants: tensors that it reads beside its inputs, the same at each call.
    """

    proto: bytes
    constants: tuple[ProgramInput, ...]
    _computation: Any
    # It holds the index of an input, or a constant, for each parameter of the computation.
    _arguments: tuple[int | torch.Tensor, ...]

    @property
    def reads(self) -> frozenset[int]:
        """The inputs that it depends on."""
        return frozenset(a for a in self._arguments if isinstance(a, int))

    @property
    def arrangement(self) -> tuple[int | None, ...]:
        """For each parameter of the computation the index of an input; None for a constant."""
        return tuple(a if isinstance(a, int) else None for a in self._arguments)

    def renumbered(self, moved: Mapping[int, int]) -> "FoldedFunction":
        """The function of inputs in another order: old index -> new, for those that it reads."""
        arguments = tuple(moved[a] if isinstance(a, int) else a for a in self._arguments)
        return dataclasses.replace(self, _arguments=arguments)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the function returns for `inputs`, pending."""
        return _private.call(
            self._computation,
            [inputs[a] if isinstance(a, int) else a for a in self._arguments],
        )

    def sharing(self, others: Sequence[ProgramInput]) -> "FoldedFunction":
        """This function, which reads one of `others` where it has an equal constant of its own.

        The compiler finds operations of two functions to be the same only if they read the same.
        """
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
    """Whether two tensors on the devices, neither of them pending, are equal; NaN equals NaN."""
    if mine.shape != its.shape or mine.dtype != its.dtype:
        return False
    one, other = _private.buffer_handles([mine, its])
    if one == other:
        return True
    mine, its = mine.cpu(), its.cpu()
    return bool(((mine == its) | ((mine != mine) & (its != its))).all())


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the devices without data, for `fold`'s `more`: it can only be computed with."""
    return _private.placeholder(shape, dtype)


def fold(
    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    *,
    more: Sequence[torch.Tensor] = (),
) -> FoldedFunction:
    """Traces `function` with stand-ins for `inputs`, which have their shapes and dtypes only.

    Args:
        function: pure: writes nothing that outlives it. Returns at least one tensor; what it
            returns is not an input.
        inputs: tensors like those of later calls.
        more: further inputs, of which `function` finds out only while it is traced: it appends a
            `stand_in` for each.
    """
    empty = [_private.placeholder(tensor.shape, tensor.dtype) for tensor in inputs]
    # Scopes and lines would be part of the proto, by which a later trace is compared with this one.
    with _private.without_scopes():
        # A placeholder can't be annotated; what is computed from one can.
        outputs = function([fresh(tensor) for tensor in empty])
        proto, numbers = _private.annotated_program(outputs, inputs=[*empty, *more])
    ids, read = _private.program_inputs(outputs)
    by_number = {number: index for index, number in enumerate(numbers) if number >= 0}
    unnamed = [number for number in range(len(read)) if number not in by_number]
    found = ProgramInput.over([ids[n] for n in unnamed], [read[n] for n in unnamed])
    constants = dict(zip(unnamed, found, strict=True))
    return FoldedFunction(
        proto=proto,
        constants=tuple(constants.values()),
        _computation=_private.computation(proto),
        _arguments=tuple(
            constants[number].tensor if number in constants else by_number[number]
            for number in range(len(read))
        ),
    )


@contextlib.contextmanager
def no_stand_in_left() -> Iterator[None]:
    """Around code that calls `fold`: nothing that was computed from a stand-in outlives it.

    The devices would compute it with the next program, and crash for want of data.

    Raises:
        StandInKeptError: something had to be taken from somebody who kept it.
    """
    device = runtime.device()
    # Inside of another trace there are stand-ins that are wanted: what is older than this one.
    since = _private.latest_tensor_id() if _guards else 0
    _guards.append(None)
    collects = gc.isenabled()
    # What it would let go of meanwhile would be missing from the count.
    gc.disable()
    before = _private.count_pending(device)
    try:
        yield
    except BaseException as error:
        # Whoever keeps the error, as Jupyter does, would keep the frames that it came through.
        for frame, _ in traceback.walk_tb(error.__traceback__):
            _empty(frame)
        _let_go(device, before, since)
        raise
    else:
        if _let_go(device, before, since):
            raise StandInKeptError
    finally:
        _guards.pop()
        if collects:
            gc.enable()


_guards: list[None] = []


def _let_go(device: torch.device, before: int, since: int) -> bool:
    if _private.count_pending(device) <= before:
        return False
    gc.collect()
    if _private.count_pending(device) <= before:
        return False
    for found in gc.get_objects():
        if not issubclass(type(found), torch.Tensor) or not _private.needs_placeholder(found):
            continue
        if _private.tensor_id(found) > since:
            _private.replace(found, torch.zeros_like(found))
    return True


def _empty(frame: types.FrameType) -> None:
    try:
        frame.clear()
    except RuntimeError:
        return  # running
    # Read once, the locals of a frame are kept as a dict, which reading them again empties.
    _ = frame.f_locals
