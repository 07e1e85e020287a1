"""A folder of native checkpoints: which are complete, and what may be deleted."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats._files import settle
from spmdzero.formats._latest import LATEST, read_latest
from spmdzero.formats.native._manifest import COMMIT, Manifest, committed_nonce, read_manifest
from spmdzero.formats.native._order import Retention

_OURS = re.compile(
    r"\.?(?:manifest|tensors|state)-([0-9a-f]{8})(?:-([0-9]{5}))?[-0-9a-z]*"
    r"\.(?:json|safetensors|pt)(?:\.tmp)?"
)
_COMMIT_LEFT = f".{COMMIT}.tmp"


def complete_tags(folder: Path) -> list[Manifest]:
    """Checkpoints whose commit is valid and whose files have their sizes, newest first."""
    found = []
    for path in _folders(folder):
        with contextlib.suppress(SpmdZeroCheckpointError, OSError):
            manifest = read_manifest(path)
            files = manifest.contents.files.items()
            if all((path / name).stat().st_size == file.size for name, file in files):
                found.append(manifest)
    return sorted(found, key=lambda manifest: manifest.saved_at, reverse=True)


def newest_complete(folder: Path, *, but: str | None = None) -> str | None:
    """The newest tag in `complete_tags`, for an error to name; None if there is none.

    Its tensors are not read: they are many gigabytes, and are checked when it is loaded.

    Args:
        folder: of the checkpoints.
        but: the tag that the error is about.
    """
    return next((found.tag for found in complete_tags(folder) if found.tag != but), None)


def is_foreign(path: Path) -> bool:
    """Whether a tag's folder holds something, and nothing of what a save of ours leaves."""
    names = os.listdir(path)
    return bool(names) and not any(
        name in (COMMIT, _COMMIT_LEFT) or _OURS.fullmatch(name) for name in names
    )


def remove_leftovers(folder: Path) -> None:
    """Deletes what saves that were cut short left behind, but nothing of a complete checkpoint.

    Nobody else may be saving into the folder.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder / f".{LATEST}.tmp")
    for path in _folders(folder):
        committed = committed_nonce(path)
        if committed is None and (path / COMMIT).exists():
            continue  # damaged, or of a newer format: not ours to judge
        remove_files(path, but=committed)
        if committed is None:
            remove_empty(path)


def remove_files(path: Path, *, but: str | None = None) -> None:
    """Deletes the files of all saves in a tag's folder, but those of this nonce."""
    for name, nonce, _ in _saved(path):
        if nonce != but:
            os.unlink(path / name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path / _COMMIT_LEFT)


def remove_written(path: Path, *, nonce: str, process: int) -> None:
    """Deletes what one process of one save has written into a tag's folder.

    Whatever else is there, a checkpoint of a newer format among it, was there before.
    """
    for name, of, by in _saved(path):
        if (of, by) == (nonce, process):
            os.unlink(path / name)


def expire(folder: Path, retention: Retention, *, saved: str) -> None:
    """Deletes the checkpoints that `retention` has no use for; never `saved`, just completed."""
    if retention.last is None:
        return
    keep = {saved, read_latest(folder)}
    mine = [manifest for manifest in complete_tags(folder) if manifest.latest]
    for manifest in mine[retention.last :]:
        step = manifest.description["counters"]["global_steps"]
        if manifest.tag not in keep and not (retention.every and step % retention.every == 0):
            path = folder / manifest.tag
            # If this is cut short from here on, no tag claims to be complete that isn't.
            os.unlink(path / COMMIT)
            settle(path)
            remove_files(path)
            remove_empty(path)
    settle(folder)


def _saved(path: Path) -> Iterator[tuple[str, str, int]]:
    """Name, nonce and process of each file that a save has written into a tag's folder."""
    for name in sorted(os.listdir(path)):
        if ours := _OURS.fullmatch(name):
            yield name, ours[1], int(ours[2] or 0)


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
