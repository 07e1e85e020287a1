"""A folder of checkpoints: its tags, which of them are complete, what `latest` says."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spmdzero.errors import SpmdZeroCheckpointError, SpmdZeroUsageError
from spmdzero.formats._files import settle, write_whole
from spmdzero.formats._manifest import COMMIT, Manifest, committed_nonce, read_manifest

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
_OURS = re.compile(
    r"\.?(manifest|begun|part|tensors|state)-([0-9a-f]{8})(?:-([0-9]{5}))?[-0-9a-z]*"
    r"\.(?:json|safetensors|pt)(?:\.tmp)?"
)
_MESSAGES = ("begun", "part")
_COMMIT_LEFT = f".{COMMIT}.tmp"
_REPORT = re.compile(r"\.{1,2}failed-[0-9a-f]{8}-[0-9]{5}\.json(?:\.tmp)?")
PATIENCE = 1800.0
"""Seconds in which the slowest of several processes must have done its part of a save."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints a folder keeps, of those that `latest` named at some time.

    A tag saved with ``save_latest=False`` is the caller's own and never deleted.

    Attributes:
        last: as many of the newest; None keeps all.
        every: and those whose global step is a multiple of this.
    """

    last: int | None = None
    every: int | None = None


def check_tag(tag: str) -> str:
    """Returns `tag`.

    Raises:
        SpmdZeroUsageError: it is no name of a folder.
    """
    if not tag or tag.startswith(".") or "/" in tag or os.sep in tag or "\0" in tag:
        raise SpmdZeroUsageError(
            f"a checkpoint's tag is the name of a folder, got {tag!r}: leave out slashes and a "
            "leading dot"
        )
    return tag


def complete_tags(folder: Path) -> list[Manifest]:
    """Checkpoints whose commit is valid and whose files have their sizes, newest first."""
    found = []
    for path in _folders(folder):
        with contextlib.suppress(SpmdZeroCheckpointError, OSError):
            manifest = read_manifest(path)
            if all((path / n).stat().st_size == f.size for n, f in manifest.files.items()):
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


def read_latest(folder: Path, name: str = LATEST) -> str | None:
    """The tag that `latest`, or another file like it, names; None without such a file.

    Raises:
        SpmdZeroCheckpointError: the file can't be read, or holds no tag.
    """
    path = folder / name
    try:
        tag = path.read_text().strip()
        return check_tag(tag)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, SpmdZeroUsageError) as error:
        raise SpmdZeroCheckpointError(
            file=path, reason=f"names no tag: {error}", newest=None
        ) from error


def write_latest(folder: Path, tag: str, name: str = LATEST) -> None:
    """Makes `latest`, or another file like it, name `tag`."""
    write_whole(folder / name, [tag.encode()])
    settle(folder)


def remove_leftovers(folder: Path, *, tag: str, nonce: str) -> None:
    """Deletes what saves that were cut short left behind, but nothing of a complete checkpoint.

    Args:
        folder: of the checkpoints; nobody else may be saving into it.
        tag, nonce: of the save that is about to start, perhaps already by another process.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder / f".{LATEST}.tmp")
    _remove_old_reports(folder)
    for path in _folders(folder):
        committed = committed_nonce(path)
        if committed is None and (path / COMMIT).exists():
            continue  # damaged, or of a newer format: not ours to judge
        remove_files(path, but=(committed, nonce))
        remove_messages(path, but=nonce)
        if committed is None and path.name != tag:
            _remove_empty(path)


def is_foreign(path: Path) -> bool:
    """Whether a tag's folder holds something, and nothing of what a save of ours leaves."""
    names = os.listdir(path)
    return bool(names) and not any(
        name in (COMMIT, _COMMIT_LEFT) or _OURS.fullmatch(name) for name in names
    )


def remove_files(path: Path, *, but: tuple[str | None, ...]) -> None:
    """Deletes the files of all saves in a tag's folder, but those of these nonces."""
    for name in sorted(os.listdir(path)):
        ours = _OURS.fullmatch(name)
        if name == _COMMIT_LEFT or (ours and ours[2] not in but):
            os.unlink(path / name)


def remove_written(path: Path, *, nonce: str, process: int) -> None:
    """Deletes what one process of one save has written, and the folder if the first leaves none.

    Whatever else is there, a checkpoint of a newer format among it, was there before.
    """
    for name in sorted(os.listdir(path)):
        ours = _OURS.fullmatch(name)
        if ours and ours[2] == nonce and int(ours[3] or 0) == process:
            os.unlink(path / name)
    if process == 0:
        _remove_empty(path)


def remove_messages(path: Path, *, of: str | None = None, but: str | None = None) -> None:
    """Deletes what processes told each other during a save: that one, or all but that one."""
    for name in sorted(os.listdir(path)):
        ours = _OURS.fullmatch(name)
        if ours and ours[1] in _MESSAGES and of in (None, ours[2]) and ours[2] != but:
            os.unlink(path / name)


def report_of(folder: Path, *, nonce: str, process: int) -> Path:
    """The file by which a process of a save says that it failed.

    Beside the tags, where no other run's save removes it, which may be why this one failed.
    """
    return folder / f".failed-{nonce}-{process:05}.json"


def _remove_old_reports(folder: Path) -> None:
    for name in os.listdir(folder):
        if _REPORT.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                # By then nobody waits any more who could want to read it.
                if time.time() - (folder / name).stat().st_mtime > PATIENCE:
                    os.unlink(folder / name)


def expire(folder: Path, retention: Retention, *, saved: str) -> None:
    """Deletes the checkpoints that `retention` has no use for; never `saved`, just completed."""
    if retention.last is None:
        return
    keep = {saved, read_latest(folder)}
    mine = [manifest for manifest in complete_tags(folder) if manifest.latest]
    for manifest in mine[retention.last :]:
        step = manifest.description["counters"]["global_steps"]
        if manifest.tag not in keep and not (retention.every and step % retention.every == 0):
            delete(folder / manifest.tag)
    settle(folder)


def delete(path: Path) -> None:
    """Deletes a checkpoint; cut short, it leaves none that claims to be complete."""
    os.unlink(path / COMMIT)
    settle(path)
    remove_files(path, but=())
    _remove_empty(path)


def _remove_empty(path: Path) -> None:
    # Others may have put files of their own beside ours.
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
