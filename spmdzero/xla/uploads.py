"""What was uploaded while somebody took notes: how host numbers reach a compiled program."""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from spmdzero.xla import _private


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


_notes: list[list[Upload]] = []


@contextlib.contextmanager
def record_uploads() -> Iterator[list[Upload]]:
    """A list that grows by each upload inside."""
    notes: list[Upload] = []
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
