"""Traced functions that later programs hold as one operation.

torch_xla makes a node for each operation, in Python, at each step. A folded function is traced
once, lowered to HLO, and called: one node. The compiler inlines calls before it partitions a
program, so that annotations and collectives inside are those of the traced function.
"""

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Sequence

import torch

from spmdzero.backend.forms._stand_ins import nothing_outlives
from spmdzero.backend.protocols._compiler import FoldedFunction
from spmdzero.backend.torch_xla import _private, runtime
from spmdzero.backend.torch_xla.fixed_values import ProgramInput
from spmdzero.backend.torch_xla.mesh import fresh


def same_value(mine: torch.Tensor, its: torch.Tensor) -> bool:
    """Whether two computed tensors on the devices are equal; NaN equals NaN."""
    if mine.shape != its.shape or mine.dtype != its.dtype:
        return False
    one, other = _private.buffer_handles([mine, its])
    if one == other:
        return True
    mine, its = mine.cpu(), its.cpu()
    return bool(((mine == its) | ((mine != mine) & (its != its))).all())


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without data for `more` of `fold`: it can only take part in computations."""
    return _private.placeholder(shape, dtype)


def fold(
    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    *,
    more: Sequence[torch.Tensor] = (),
) -> FoldedFunction:
    """Traces `function` with stand-ins for `inputs`, which have only their shapes and dtypes.

    Args:
        function: pure: it writes nothing that outlives it. It returns at least one tensor, and
            never an input itself.
        inputs: tensors like those of later calls.
        more: further inputs, which `function` discovers only while it is traced: it appends a
            `stand_in` for each.
    """
    empty = [_private.placeholder(tensor.shape, tensor.dtype) for tensor in inputs]
    # Scopes and lines would be part of the proto, by which later traces are compared with this one.
    with _private.without_scopes():
        # A placeholder can't be annotated, but a value computed from it can.
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
        body=functools.partial(_private.call, _private.computation(proto)),
        arguments=tuple(
            constants[number].tensor if number in constants else by_number[number]
            for number in range(len(read))
        ),
    )


@contextlib.contextmanager
def no_stand_in_left() -> Iterator[None]:
    """Context around code that calls `fold`: no tensor computed from a stand-in outlives it.

    The devices would compute it with the next program, and crash for want of data.

    Raises:
        StandInKeptError: some code kept such a tensor, which was taken from it.
    """
    device = runtime.device()
    # Inside another trace some stand-ins are wanted: all that are older than this trace.
    since = _private.latest_tensor_id() if _guards else 0
    _guards.append(None)
    try:
        with nothing_outlives(lambda: _Pending(device, _private.count_pending(device), since)):
            yield
    finally:
        _guards.pop()


_guards: list[None] = []


@dataclasses.dataclass(frozen=True)
class _Pending:
    """The pending tensors on a device.

    Attributes:
        device: the device.
        before: number of pending tensors before the trace.
        since: tensors made during the trace have higher ids.
    """

    device: torch.device
    before: int
    since: int

    def is_any(self) -> bool:
        """Whether there are more pending tensors than before."""
        return _private.count_pending(self.device) > self.before

    def replace(self) -> None:
        """Puts zeros in the place of values computed from stand-ins."""
        tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        # C++ may be the only holder of one, and release it while others are looked at.
        _private.hold(tensors)
        for found in tensors:
            if _private.needs_placeholder(found) and _private.tensor_id(found) > self.since:
                _private.replace(found, torch.zeros_like(found))
