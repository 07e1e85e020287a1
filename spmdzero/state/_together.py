"""What fails on one host fails on all of them, where each would wait for the others afterwards."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from spmdzero.backend.processes import gather_objects
from spmdzero.errors import SpmdZeroCheckpointError

_Value = TypeVar("_Value")


@contextlib.contextmanager
def together(file: Path, *, doing: str, processes: int) -> Iterator[None]:
    """What is raised inside is raised by every process; each of them must come here.

    Args:
        file: what the error of the other processes is about.
        doing: what it keeps from being done to it, such as ``"saved"``.
        processes: their number; alone, nothing is exchanged.

    Raises:
        SpmdZeroCheckpointError: another process raised; with its message.
    """
    if processes == 1:
        yield
        return
    try:
        yield
    except Exception as error:
        everyones(str(error) or type(error).__name__, processes=processes)
        raise
    for process, said in enumerate(everyones("", processes=processes)):
        if said:
            raise SpmdZeroCheckpointError(
                file=file, reason=f"can't be {doing}: process {process}: {said}", newest=None
            )


def everyones(value: _Value, *, processes: int) -> list[_Value]:
    """What each process calls this with, in their order; of their main threads only."""
    return [value] if processes == 1 else gather_objects(value)
