"""A folder of native checkpoints: which are complete, and which may be deleted."""

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
    """A folder with a complete checkpoint, under any name.

    Attributes:
        path: the folder.
        manifest: that of the checkpoint.
    """

    path: Path
    manifest: Manifest

    @property
    def tag(self) -> str:
        """The folder's name, under which it is loaded."""
        return self.path.name

    @property
    def is_itself(self) -> bool:
        """Whether the folder is where it was saved: no copy, no link, not renamed."""
        return self.manifest.tag == self.tag and not self.path.is_symlink()


def complete_tags(folder: Path) -> list[CompleteTag]:
    """Checkpoints with a valid commit and files of the right sizes, newest first.

    The copy of a checkpoint that has the name under which it was saved comes before others.
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
    """The newest tag in `complete_tags`, to be named in an error; None if there is none.

    Its tensors are not read: they are many gigabytes, and loading checks them.

    Args:
        folder: of the checkpoints.
        but: the tag that the error is about.
    """
    others = (found for found in complete_tags(folder) if found.tag != but)
    # A link to the tag that the error is about doesn't count as another one.
    about = (folder / but).resolve() if but else None
    return next((found.tag for found in others if found.path.resolve() != about), None)


def is_foreign(path: Path) -> bool:
    """Whether a tag's folder has files, but none that a save of spmdzero's leaves."""
    names = os.listdir(path)
    return bool(names) and not any(
        name in (COMMIT, _COMMIT_LEFT) or _PART.fullmatch(name) for name in names
    )


def remove_leftovers(folder: Path) -> None:
    """Deletes the files of saves that were cut short, but nothing of a complete checkpoint.

    No other process may be saving into the folder.
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
    """Deletes the files of all saves of a tag except that of the nonce `by`, which is committed."""
    for nonce in {nonce for _, nonce, _ in _parts(path)} - {by}:
        remove_written(path, nonce=nonce)


def remove_written(path: Path, *, nonce: str, process: int | None = None) -> None:
    """Deletes the files that one save, or one process of it, has written into a tag's folder.

    All other files, as of a newer format or a user's, were there before and stay.
    """
    for name in sorted(os.listdir(path)):
        part, manifest = _PART.fullmatch(name), _MANIFEST.fullmatch(name)
        of, by = (part[1], int(part[2])) if part else (manifest[1] if manifest else None, 0)
        if of == nonce and process in (None, by):
            os.unlink(path / name)


def expire(folder: Path, retention: Retention, *, saved: str) -> None:
    """Deletes the checkpoints that `retention` doesn't keep; never `saved`, which is complete now.

    Deletes only checkpoints where they were saved: copies, links and their targets are kept. If one
    can't be deleted, it is logged; the new checkpoint is complete all the same.
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
    """Deletes a tag's folder, unless there are other files in it."""
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
