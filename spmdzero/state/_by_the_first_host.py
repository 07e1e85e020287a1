"""Lets the first host write a running state, of whose tensors each host holds parts."""

import dataclasses
from collections.abc import Callable

import torch

from spmdzero.backend import runtime
from spmdzero.backend.hosts.processes import gather_objects, gather_on_first
from spmdzero.errors import SpmdZeroRuntimeError
from spmdzero.formats import Box, StoredTensor, TrainingState, assemble, meet

_Parts = list[tuple[Box, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class _Read:
    """A request of the first host for a part of a tensor."""

    key: str
    box: Box


@dataclasses.dataclass(frozen=True)
class _Written:
    """The end of the requests; `error` is why the first host could not write, "" if it could."""

    error: str = ""


def written_by_the_first_host(state: TrainingState, write: Callable[[TrainingState], None]) -> None:
    """Calls `write` on the first host, to which the others send the parts that it reads.

    Every host calls this with its own view of the same state. A tensor is put together on the first
    host while `write` reads it, so that only one tensor is in its memory at a time, or as many as
    `write` keeps.

    Raises:
        SpmdZeroRuntimeError: on the other hosts, if `write` failed on the first host, which raises
            the error of `write`; on the first host, if another one could not read its part.
    """
    if runtime.process_count() == 1:
        write(state)
    elif runtime.process_index() == 0:
        gathered = {key: _from_all(key, tensor) for key, tensor in state.tensors.items()}
        try:
            write(dataclasses.replace(state, tensors=gathered))
        except BaseException as error:
            gather_objects(_Written(str(error) or type(error).__name__))
            raise
        gather_objects(_Written())
    else:
        _serve(state)


def _from_all(key: str, tensor: StoredTensor) -> StoredTensor:
    def read(box: Box) -> torch.Tensor:
        gather_objects(_Read(key, box))
        answers = gather_on_first(_parts(tensor, box))
        assert answers is not None
        pieces = list[tuple[Box, torch.Tensor]]()
        for process, answer in enumerate(answers):
            if isinstance(answer, str):
                raise SpmdZeroRuntimeError(f"process {process} can't read {key}: {answer}")
            pieces += answer
        return assemble(box, pieces, dtype=tensor.dtype)

    return dataclasses.replace(tensor, read=read)


def _serve(state: TrainingState) -> None:
    """Sends the first host the parts that it requests, until it has written."""
    while True:
        asked = gather_objects(None)[0]
        if isinstance(asked, _Written):
            if asked.error:
                raise SpmdZeroRuntimeError(f"the first host could not write: {asked.error}")
            return
        assert isinstance(asked, _Read)
        gather_on_first(_parts(state.tensors[asked.key], asked.box))


def _parts(tensor: StoredTensor, box: Box) -> _Parts | str:
    """The pieces of a part that this host saves, or why they can't be read."""
    try:
        common = [common for piece in tensor.pieces if (common := meet(piece, box)) is not None]
        return [(each, tensor.read(each)) for each in common]
    except Exception as error:
        return str(error) or type(error).__name__
