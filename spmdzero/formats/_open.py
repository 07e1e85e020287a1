"""Finds and opens the checkpoint that a caller names, whatever its format."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats import deepspeed
from spmdzero.formats._boxes import Box
from spmdzero.formats._latest import LATEST, LATEST_UNIVERSAL, check_tag, read_latest
from spmdzero.formats._state import TrainingState
from spmdzero.formats.native import (
    COMMIT,
    complete_tags,
    is_foreign,
    newest_complete,
    read_native,
)


def latest_tag(folder: Path, *, universal: bool = False) -> str | None:
    """The tag that is loaded when the caller names none; None if nothing was ever saved.

    `latest` names it, or `latest_universal` if there is only that file, or if `universal` prefers
    it. Before the first `latest` was written, it is the newest complete checkpoint that was to be
    named there: its saving was cut short after the commit.

    Raises:
        SpmdZeroCheckpointError: `latest` is not readable.
    """
    names = (LATEST_UNIVERSAL, LATEST) if universal else (LATEST, LATEST_UNIVERSAL)
    for name in names:
        named = read_latest(folder, name)
        if named is not None:
            return named
    saved = (found for found in complete_tags(folder) if found.is_itself)
    return next((found.tag for found in saved if found.manifest.latest), None)


def format_of(path: Path) -> Literal["native", "universal", "deepspeed"]:
    """The format of a tag's folder; native if it has no known format."""
    if (path / COMMIT).exists() or not path.is_dir() or not deepspeed.recognises(path):
        return "native"
    return "universal" if (path / "zero").is_dir() else "deepspeed"


def locate(source: Path, tag: str | None = None) -> tuple[Path, str]:
    """The folder of checkpoints and the tag to which `source` refers.

    Args:
        source: a folder of checkpoints, or the folder of one tag.
        tag: the checkpoint in `source`; the one that `latest` names by default.

    Raises:
        SpmdZeroCheckpointError: there is no checkpoint.
    """
    if tag is not None:
        return source, tag
    folder = source.resolve()
    if (folder / COMMIT).exists() or format_of(folder) != "native":
        return folder.parent, folder.name
    tag = latest_tag(source)
    if tag is None:
        raise SpmdZeroCheckpointError(
            file=source,
            reason="is no folder of checkpoints, nor of one: there is no file `latest` in it",
            fix="Name the folder that was passed to save_checkpoint, or a tag by --tag",
        )
    return source, tag


def open_state(
    folder: str | os.PathLike[str],
    tag: str,
    *,
    process: int = 0,
    order: deepspeed.Order | None = None,
) -> TrainingState:
    """The state saved as `tag`, in any format.

    Args:
        folder: of the checkpoints.
        tag: a folder in it.
        process: the saving process whose host state is read.
        order: the names of the parameters in each param group, for `deepspeed.read`.

    Raises:
        SpmdZeroCheckpointError: there is no such tag, or its files are incomplete or altered.
        SpmdZeroUsageError: `tag` can't name a checkpoint.
    """
    root, path = Path(folder), Path(folder) / check_tag(tag)
    with naming_the_newest(root, but=tag):
        if format_of(path) != "native":
            state = deepspeed.read(path, order)
        elif path.is_dir() and not (path / COMMIT).exists() and is_foreign(path):
            raise SpmdZeroCheckpointError(
                file=path, reason="is no checkpoint that spmdzero or DeepSpeed wrote"
            )
        else:
            state = read_native(path, process=process)

    def check(parts: Mapping[str, Iterable[Box]]) -> None:
        with naming_the_newest(root, but=tag):
            state.check(parts)

    return dataclasses.replace(state, check=check)


@contextlib.contextmanager
def naming_the_newest(folder: Path, *, but: str | None = None) -> Iterator[None]:
    """Context that adds the newest other complete checkpoint to errors about a checkpoint.

    Args:
        folder: of the checkpoints.
        but: the tag that the body handles.
    """
    try:
        yield
    except SpmdZeroCheckpointError as error:
        if error.newest is not None:
            raise
        raise SpmdZeroCheckpointError(
            file=error.file,
            reason=error.reason,
            newest=newest_complete(folder, but=but) or deepspeed.newest_complete(folder, but=but),
            fix=error.fix,
        ) from error
