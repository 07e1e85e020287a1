"""The table of contents of a native checkpoint, and the commit file that vouches for it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats._files import checksum
from spmdzero.formats.native._contents import Contents, require

VERSION = 1
COMMIT = "COMMITTED"
_COMMITTED = re.compile(
    r"spmdzero checkpoint 1: (manifest-([0-9a-f]{8})\.json) ([1-9]\d*) ([0-9a-f]{32})\n"
)
_NEWER = re.compile(r"spmdzero checkpoint ([1-9]\d*): ")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description and the contents of a checkpoint.

    Attributes:
        tag: the folder's name.
        nonce: the common part of its files' names, 8 hexadecimal digits.
        saved_at: the time at which the save began, seconds since 1970.
        latest: whether `latest` was to name it.
        description: for people and tools: versions, config, plan, mesh, counters.
        contents: its files and tensors.
    """

    tag: str
    nonce: str
    saved_at: float
    latest: bool
    description: Mapping[str, Any]
    contents: Contents

    @property
    def name(self) -> str:
        """The name of the manifest's file."""
        return f"manifest-{self.nonce}.json"

    @property
    def step(self) -> int | None:
        """The global step at which it was saved, None where it isn't recorded."""
        counters = self.description.get("counters")
        step = counters.get("global_steps") if isinstance(counters, dict) else None
        return step if isinstance(step, int) else None

    def check(self, *, nonce: str) -> None:
        """Checks that only files of this nonce are named, and that their pieces form the tensors.

        Raises:
            ValueError: another file is named, or pieces are missing.
        """
        require(self.nonce == nonce, "its nonce is another")
        require(isinstance(self.tag, str), "its tag is no name")
        require(isinstance(self.saved_at, int | float), "its time is no number")
        self.contents.check(nonce=nonce)

    def to_json(self) -> bytes:
        """The content of the manifest's file."""
        table = {
            "format": "spmdzero checkpoint",
            "version": VERSION,
            **{key: getattr(self, key) for key in _OWN},
            **self.description,
            **self.contents.to_json(),
        }
        # No indentation: with a line for each number a thousand hosts' table would be twice as
        # long.
        return json.dumps(table, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """The manifest that `to_json` wrote."""
        table = json.loads(data)
        return cls(
            **{key: table.pop(key) for key in _OWN},
            contents=Contents.from_json(table),
            description={key: table[key] for key in table.keys() - _NOT_DESCRIBING},
        )


_OWN = ("tag", "nonce", "saved_at", "latest")
_NOT_DESCRIBING = {"format", "version", "states", "files", "tensors"}


def commit_line(manifest: Manifest, data: bytes) -> bytes:
    """The content of the commit file that vouches for `data`, the manifest's content."""
    name, size = manifest.name, len(data)
    return f"spmdzero checkpoint {VERSION}: {name} {size} {checksum(data)}\n".encode()


def committed_nonce(folder: Path) -> str | None:
    """The nonce of the files that a tag's commit file vouches for; None without a valid one."""
    try:
        return _commit_of(folder)[2]
    except SpmdZeroCheckpointError:
        return None


def _commit_of(folder: Path) -> re.Match[str]:
    """The manifest's name, nonce, size and checksum, from a tag's commit file.

    Raises:
        SpmdZeroCheckpointError: there is no commit, or it is of a newer format, or altered.
    """
    commit = folder / COMMIT
    try:
        line = commit.read_bytes().decode("ascii", "replace")
    except FileNotFoundError:
        reason = "is not a complete checkpoint: its saving was cut short"
        if not folder.is_dir():
            reason = "there is no such tag"
        raise SpmdZeroCheckpointError(file=folder, reason=reason) from None
    except OSError as error:
        raise unreadable(commit, error) from error
    if found := _COMMITTED.fullmatch(line):
        return found
    newer = _NEWER.match(line)
    reason = "altered: this is not what a commit file says"
    if newer and int(newer[1]) > VERSION:
        reason = f"format {newer[1]} is newer than the {VERSION} that this spmdzero reads"
    raise SpmdZeroCheckpointError(file=commit, reason=reason)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a tag's folder, checked against its commit file; reads no other file.

    Raises:
        SpmdZeroCheckpointError: as for the commit file, or the manifest is missing or altered.
    """
    name, nonce, size, expected = _commit_of(folder).groups()
    path = folder / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) != int(size) or checksum(data) != expected:
        reason = "altered: its checksum is not the one in the commit file"
        raise SpmdZeroCheckpointError(file=path, reason=reason)
    try:
        manifest = Manifest.from_json(data)
        manifest.check(nonce=nonce)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise SpmdZeroCheckpointError(
            file=path, reason=f"is no manifest of a checkpoint ({said})"
        ) from error
    return manifest


def unreadable(file: Path, error: Exception) -> SpmdZeroCheckpointError:
    """The error that a file of a checkpoint is missing, or can't be read."""
    reason = f"can't be read: {getattr(error, 'strerror', None) or error}"
    if isinstance(error, FileNotFoundError):
        reason = "is missing"
    return SpmdZeroCheckpointError(file=file, reason=reason)
