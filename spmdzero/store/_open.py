"""Finding the checkpoint that a caller means, and the format that it is in."""

import os
from pathlib import Path
from typing import Protocol

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.store._folder import check_tag, complete_tags, is_foreign, read_latest
from spmdzero.store._manifest import COMMIT
from spmdzero.store._native import newest_good, read_native
from spmdzero.store._state import TrainingState


class ForeignReader(Protocol):
    """Another format, which a tag's folder may be in."""

    def recognises(self, folder: Path) -> bool:
        """Whether the folder looks like one of this format."""
        ...

    def read(self, folder: Path) -> TrainingState:
        """The state in it."""
        ...


FOREIGN_READERS: tuple[ForeignReader, ...] = ()


def latest_tag(folder: Path) -> str | None:
    """The tag that is loaded when the caller names none; None when nothing was ever saved.

    That is what `latest` says. Before the first `latest` was written, it is the newest complete
    checkpoint that was to be named by it: its saving was cut short after the commit.

    Raises:
        SpmdZeroCheckpointError: `latest` is not readable.
    """
    named = read_latest(folder)
    if named is not None:
        return named
    return next((found.tag for found in complete_tags(folder) if found.latest), None)


def open_state(folder: str | os.PathLike[str], tag: str, *, process: int = 0) -> TrainingState:
    """The state saved as `tag`, in whichever format it is.

    Args:
        folder: of the checkpoints.
        tag: a folder in it.
        process: whose host state, of those that saved it.

    Raises:
        SpmdZeroCheckpointError: there is no such tag, or its files are not complete and unaltered.
        SpmdZeroUsageError: no tag can be called so.
    """
    path = Path(folder) / check_tag(tag)
    if path.is_dir() and not (path / COMMIT).exists():
        for reader in FOREIGN_READERS:
            if reader.recognises(path):
                return reader.read(path)
        if is_foreign(path):
            raise SpmdZeroCheckpointError(
                file=path,
                reason="is no checkpoint that spmdzero or DeepSpeed wrote",
                newest=newest_good(Path(folder)),
            )
    return read_native(Path(folder), tag, process=process)
