"""Finding the checkpoint that a caller means, and the format that it is in."""

import os
from pathlib import Path

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats import deepspeed
from spmdzero.formats._folder import (
    LATEST,
    LATEST_UNIVERSAL,
    check_tag,
    complete_tags,
    is_foreign,
    newest_complete,
    read_latest,
)
from spmdzero.formats._manifest import COMMIT
from spmdzero.formats._native import read_native
from spmdzero.formats._state import TrainingState


def latest_tag(folder: Path, *, universal: bool = False) -> str | None:
    """The tag that is loaded when the caller names none; None when nothing was ever saved.

    That is what `latest` says; what `latest_universal` says if there is only that, or if
    `universal` prefers it. Before the first `latest` was written, it is the newest complete
    checkpoint that was to be named by it: its saving was cut short after the commit.

    Raises:
        SpmdZeroCheckpointError: `latest` is not readable.
    """
    names = (LATEST_UNIVERSAL, LATEST) if universal else (LATEST, LATEST_UNIVERSAL)
    for name in names:
        named = read_latest(folder, name)
        if named is not None:
            return named
    return next((found.tag for found in complete_tags(folder) if found.latest), None)


def open_state(
    folder: str | os.PathLike[str],
    tag: str,
    *,
    process: int = 0,
    order: deepspeed.Order | None = None,
) -> TrainingState:
    """The state saved as `tag`, in whichever format it is.

    Args:
        folder: of the checkpoints.
        tag: a folder in it.
        process: whose host state, of those that saved it.
        order: the names of the parameters in each param group, for `deepspeed.read`.

    Raises:
        SpmdZeroCheckpointError: there is no such tag, or its files are not complete and unaltered.
        SpmdZeroUsageError: no tag can be called so.
    """
    path = Path(folder) / check_tag(tag)
    if path.is_dir() and not (path / COMMIT).exists():
        if deepspeed.recognises(path):
            return deepspeed.read(path, order)
        if is_foreign(path):
            raise SpmdZeroCheckpointError(
                file=path,
                reason="is no checkpoint that spmdzero or DeepSpeed wrote",
                newest=newest_complete(Path(folder)),
            )
    return read_native(Path(folder), tag, process=process)
