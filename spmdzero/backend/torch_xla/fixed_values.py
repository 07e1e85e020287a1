"""Buffers that a traced program reads, and that may hold other values when it runs again."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence

import torch

from spmdzero.backend.torch_xla import _private


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ProgramInput:
    """A buffer that a pending program reads.

    Attributes:
        handle: identifies the buffer.
        tensor: a tensor over the buffer.
        first_id: the id of the tensor that it was first read through; later tensors have higher
            ids.
    """

    handle: int
    tensor: torch.Tensor
    first_id: int

    @classmethod
    def of(cls, roots: Sequence[torch.Tensor]) -> list["ProgramInput"]:
        """The inputs of the pending program of `roots`, in its order; none may be a placeholder."""
        return cls.over(*_private.program_inputs(roots))

    @classmethod
    def over(cls, ids: Sequence[int], tensors: Sequence[torch.Tensor]) -> list["ProgramInput"]:
        """The inputs for the results of `program_inputs`, none of them a placeholder."""
        handles = _private.buffer_handles(tensors)
        return [
            cls(handle=handle, tensor=tensor, first_id=first_id)
            for first_id, tensor, handle in zip(ids, tensors, handles, strict=True)
        ]

    @property
    def is_seed(self) -> bool:
        """Whether the buffer is the seed of the device's own generator."""
        return self.first_id == _private.seed_id()

    def is_number(self) -> bool:
        """Whether the buffer is a Python number that torch_xla uploaded; may read its value."""
        if self.tensor.dim():
            return False
        # torch_xla keeps the buffers of numbers by value, and finds this one again.
        zero = torch.zeros((), dtype=self.tensor.dtype, device=self.tensor.device)
        _, found = _private.program_inputs([zero + self.tensor.item()])
        return self.handle in _private.buffer_handles(found)


class Uploads:
    """The uploads that Python made during a trace, which are the same at each step.

    Attributes:
        since: tensors made after this object have higher ids.
        handles: of the buffers.
    """

    def __init__(self) -> None:
        self.since, self.handles = _private.latest_tensor_id(), set[int]()


_recorded: list[Uploads] = []


@contextlib.contextmanager
def record_uploads() -> Iterator[Uploads]:
    """Context that records each upload inside."""
    uploads = Uploads()
    _recorded.append(uploads)
    try:
        yield uploads
    finally:
        _recorded.remove(uploads)


def note_upload(placed: torch.Tensor) -> None:
    """Records an upload, if recordings are in force."""
    if _recorded:
        handles = _private.buffer_handles([placed])
        for uploads in _recorded:
            uploads.handles.update(handles)


def unknown_values(
    inputs: Sequence[ProgramInput], uploads: Uploads, *, known: Collection[int] = ()
) -> list[ProgramInput]:
    """The inputs of a program that may differ when it runs again.

    Python numbers don't count, nor do the indices that torch_xla uploads for its own use, such as
    those of a slice of an expanded tensor.

    Args:
        inputs: of the program; a seed always counts.
        uploads: those recorded since the trace began.
        known: handles of other inputs that stay the same.
    """
    known = {*known, *uploads.handles}
    return [
        found
        for found in inputs
        if found.is_seed
        or not (found.handle in known or found.is_number() or _may_be_indices(found, uploads.since))
    ]


def is_fixed(tensor: torch.Tensor) -> bool:
    """Whether a pending value depends on no unknown value, seed or key of random numbers.

    False outside `record_uploads`: finding its buffers hides them from `sync`.
    """
    if not _recorded:
        return False
    ids, values = _private.program_inputs([tensor])
    if _private.any_without_data(values):
        return False
    return not unknown_values(ProgramInput.over(ids, values), _recorded[-1])


def _may_be_indices(found: ProgramInput, since: int) -> bool:
    # Buffers that existed before have a lower id, even if they are read through a new view.
    tensor = found.tensor
    return tensor.dim() > 0 and tensor.dtype == torch.int64 and found.first_id > since
