"""What was uploaded while somebody took notes: how host numbers reach a compiled program."""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from spmdzero.backend.torch_xla import _private


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Upload:
    """One tensor on its way to the devices.

    Attributes:
        role: what it is: ``"batch"``, ``"key"`` (of random numbers), ``"numbers"`` (of param
            groups), ... or ``"constant"``.
        host: the tensor on the CPU.
        handle: of its buffer on the devices.
    """

    role: str
    host: torch.Tensor
    handle: int


class Uploads(list[Upload]):
    """Those since this was made.

    Attributes:
        since: ids of tensors made since then are higher.
        fixed_reads: transfers the other way, of values that depend on nothing that changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.since, self.fixed_reads = _private.latest_tensor_id(), 0

    @property
    def constants(self) -> set[int]:
        """The buffers of those whose role is ``"constant"``."""
        return {upload.handle for upload in self if upload.role == "constant"}


_notes: list[Uploads] = []


@contextlib.contextmanager
def record_uploads() -> Iterator[Uploads]:
    """A list that grows by each upload inside."""
    notes = Uploads()
    _notes.append(notes)
    try:
        yield notes
    finally:
        _notes.remove(notes)


def note_upload(role: str, host: torch.Tensor, placed: torch.Tensor) -> None:
    """Takes note of an upload, if somebody asked for it."""
    for notes in _notes:
        (handle,) = _private.buffer_handles([placed])
        notes.append(Upload(role=role, host=host, handle=handle))


def uploads_so_far() -> Uploads | None:
    """What the innermost `record_uploads` has noted, None outside of any."""
    return _notes[-1] if _notes else None
