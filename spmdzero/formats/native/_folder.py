"""A folder of native checkpoints: which are complete, and what may be deleted."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spmdzero._logging import is_new
from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats._files import settle
from spmdzero.formats._latest import LATEST, LATEST_UNIVERSAL, read_latest
from spmdzero.formats.native._manifest import COMMIT, Manifest, committed_nonce, read_manifest
from spmdzero.formats.native._order import Retention
from spmdzero.formats.native._unfinished import forget, note, remove_note, unfinished

_PART = re.compile(
    r"\.?(?:tensors|state)-([0-9a-f]{8})-([0-9]{5})-of-[0-9]{5}\.(?:safetensors|pt)(?:\.tmp)?"
)
_MANIFEST = re.compile(r"\.?manifest-([0-9a-f]{8})\.json(?:\.tmp)?")
_COMMIT_LEFT = f".{COMMIT}.tmp"
logger = logging.getLogger("spmdzero")


@dataclass(frozen=True)
class CompleteTag:
    """A folder that holds a complete checkpoint, under whatever name.

    Attributes:
        path: the folder.
        manifest: what it holds.
    """

    path: Path
    manifest: Manifest

    @property
    def tag(self) -> str:
        """The folder's name, by which it is loaded."""
        return self.path.name

    @property
    def is_itself(self) -> bool:
        """Whether it is where it was saved: no copy, no link, not renamed."""
        return self.manifest.tag == self.tag and not self.path.is_symlink()


def complete_tags(folder: Path) -> list[CompleteTag]:
    """Checkpoints whose commit is valid and whose files have their sizes, newest first.

    Of two copies of one checkpoint the one that was saved under its name comes first.
    """
    found = []
    for path in _folders(folder):
        with contextlib.suppress(SpmdZeroCheckpointError, OSError):
            manifest = read_manifest(path)
            files = manifest.contents.files.items()
            if all((path / name).stat().st_size == file.size for name, file in files):
                found.append(CompleteTag(path, manifest))
    return sorted(found, key=lambda tag: (tag.manifest.saved_at, tag.is_itself), reverse=True)


def newest_complete(folder: Path, *, but: str | None = None) -> str | None:
    """The newest tag in `complete_tags`, for an error to name; None if there is none.

    Its tensors are not read: they are many gigabytes, and are checked when it is loaded.

    Args:
        folder: of the checkpoints.
        but: the tag that the error is about.
    """
    others = (found for found in complete_tags(folder) if found.tag != but)
    # A link to the tag that the error is about is no other one.
    about = (folder / but).resolve() if but else None
    return next((found.tag for found in others if found.path.resolve() != about), None)


def is_foreign(path: Path) -> bool:
    """Whether a tag's folder holds something, and nothing of what a save of ours leaves."""
    names = os.listdir(path)
    return bool(names) and not any(
        name in (COMMIT, _COMMIT_LEFT) or _PART.fullmatch(name) for name in names
    )


def remove_leftovers(folder: Path) -> None:
    """Deletes what saves that were cut short left behind, but nothing of a complete checkpoint.

    Nobody else may be saving into the folder.
    """
    for name in (LATEST, LATEST_UNIVERSAL):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / f".{name}.tmp")
    for found in list(unfinished(folder)):
        try:
            if (folder / found.tag).is_dir():
                _finish(folder / found.tag, found.nonce)
        except OSError as error:
            _tell(f"what is left of a save in {folder / found.tag} can't be deleted", error)
        else:
            remove_note(found)


def _finish(path: Path, nonce: str) -> None:
    if committed_nonce(path) == nonce:
        remove_replaced(path, by=nonce)
        return
    remove_written(path, nonce=nonce)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path / _COMMIT_LEFT)
    remove_empty(path)


def _tell(what: str, error: OSError) -> None:
    line = f"{what}: {error.strerror or error}"
    if is_new(line):
        logger.warning("%s", line)


def remove_replaced(path: Path, *, by: str) -> None:
    """Deletes the files of all saves of a tag but the one of the nonce `by`, just committed."""
    for nonce in {nonce for _, nonce, _ in _parts(path)} - {by}:
        remove_written(path, nonce=nonce)


def remove_written(path: Path, *, nonce: str, process: int | None = None) -> None:
    """Deletes what one save, or one process of it, has written into a tag's folder.

    Whatever else is there, a checkpoint of a newer format or a user's files, was there before.
    """
    for name in sorted(os.listdir(path)):
        part, manifest = _PART.fullmatch(name), _MANIFEST.fullmatch(name)
        of, by = (part[1], int(part[2])) if part else (manifest[1] if manifest else None, 0)
        if of == nonce and process in (None, by):
            os.unlink(path / name)


def expire(folder: Path, retention: Retention, *, saved: str) -> None:
    """Deletes the checkpoints that `retention` has no use for; never `saved`, just completed.

    Only where they were saved: copies, links and what a link of the folder leads to are kept. One
    that can't be deleted is told of; the new checkpoint is complete all the same.
    """
    if retention.last is None:
        return
    linked = {path.resolve() for path in _folders(folder) if path.is_symlink()}
    keep = {saved, read_latest(folder)}
    mine = [found for found in complete_tags(folder) if found.manifest.latest and found.is_itself]
    for found in mine[retention.last :]:
        step = found.manifest.step
        regular = retention.every and (step is None or step % retention.every == 0)
        if found.tag in keep or regular or found.path.resolve() in linked:
            continue
        try:
            _delete(folder, found)
        except OSError as error:
            _tell(f"the checkpoint {found.path}, which is kept no longer, can't be deleted", error)
    settle(folder)


def _delete(folder: Path, found: CompleteTag) -> None:
    nonce, path = found.manifest.nonce, found.path
    note(folder, nonce, tag=found.tag)
    # If this is cut short from here on, no tag claims to be complete that isn't.
    os.unlink(path / COMMIT)
    settle(path)
    remove_written(path, nonce=nonce)
    remove_empty(path)
    forget(folder, nonce)


def _parts(path: Path) -> Iterator[tuple[str, str, int]]:
    """Name, nonce and process of each file of tensors or host state in a tag's folder."""
    for name in sorted(os.listdir(path)):
        if part := _PART.fullmatch(name):
            yield name, part[1], int(part[2])


def remove_empty(path: Path) -> None:
    """Deletes a tag's folder, unless others have put files of their own beside ours."""
    if not os.listdir(path):
        os.rmdir(path)


def _folders(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        path = folder / name
        if not name.startswith(".") and path.is_dir() and os.access(path, os.R_OK | os.X_OK):
            yield path
