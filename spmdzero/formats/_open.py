"""Finding the checkpoint that a caller means, in whichever format it is."""

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
    saved = (found for found in complete_tags(folder) if found.is_itself)
    return next((found.tag for found in saved if found.manifest.latest), None)


def format_of(path: Path) -> Literal["native", "universal", "deepspeed"]:
    """The format of the folder of a tag; native if it is none at all."""
    if (path / COMMIT).exists() or not path.is_dir() or not deepspeed.recognises(path):
        return "native"
    return "universal" if (path / "zero").is_dir() else "deepspeed"


def locate(source: Path, tag: str | None = None) -> tuple[Path, str]:
    """The folder of checkpoints and the tag that `source` means.

    Args:
        source: a folder of checkpoints, or the folder of one tag.
        tag: which of them; what `latest` says by default.

    Raises:
        SpmdZeroCheckpointError: there is nothing.
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
    """Errors of the body about a checkpoint name the newest other one that is complete.

    Args:
        folder: of the checkpoints.
        but: the tag that the body is about.
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
