"""The table of contents of a native checkpoint, and the commit file that vouches for it."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats._boxes import Box
from spmdzero.formats._files import checksum
from spmdzero.formats._tensor_file import CODES, DTYPES

VERSION = 1
COMMIT = "COMMITTED"
_COMMITTED = re.compile(
    r"spmdzero checkpoint 1: (manifest-([0-9a-f]{8})\.json) ([1-9]\d*) ([0-9a-f]{32})\n"
)
_NEWER = re.compile(r"spmdzero checkpoint ([1-9]\d*): ")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What is known of one file.

    Attributes:
        size: in bytes.
        checksum: of its first `checked` bytes.
        checked: all of a file of host state; of a file of tensors, whose pieces have checksums of
            their own, the header.
    """

    size: int
    checksum: str
    checked: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one part of a tensor stands in the files of a checkpoint.

    Attributes:
        file: the file's name.
        offset: of its first byte.
        box: which part of the tensor.
        checksum: of its bytes.
    """

    file: str
    offset: int
    box: Box
    checksum: str


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor and where its pieces stand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        pieces = [[p.file, p.offset, p.box, p.checksum] for p in self.pieces]
        return {"dtype": CODES[self.dtype], "shape": self.shape, "pieces": pieces}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "TensorEntry":
        """The entry that `to_json` wrote."""
        return cls(
            shape=tuple(entry["shape"]),
            dtype=DTYPES[entry["dtype"]],
            pieces=tuple(
                # A thousand pieces stand in each file.
                Piece(sys.intern(file), offset, tuple((start, stop) for start, stop in box), digest)
                for file, offset, box, digest in entry["pieces"]
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What the files of a checkpoint hold, or those of one of the processes that save it.

    Attributes:
        states: the files of host state, in the order of the processes.
        files: all files by name, without the manifest itself.
        tensors: by name; all of them, with the pieces that are in the files.
    """

    states: tuple[str, ...]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def joined(cls, parts: list["Contents"]) -> "Contents":
        """That of all processes, in their order."""
        return cls(
            states=tuple(name for part in parts for name in part.states),
            files={name: entry for part in parts for name, entry in part.files.items()},
            tensors={
                name: TensorEntry(
                    shape=first.shape,
                    dtype=first.dtype,
                    pieces=tuple(piece for part in parts for piece in part.tensors[name].pieces),
                )
                for name, first in parts[0].tensors.items()
            },
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {
            "states": self.states,
            "files": {name: vars(entry) for name, entry in self.files.items()},
            "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
        }

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Contents":
        """The contents that `to_json` wrote; other keys of the table are left alone."""
        return cls(
            states=tuple(table["states"]),
            files={name: FileEntry(**entry) for name, entry in table["files"].items()},
            tensors={n: TensorEntry.from_json(entry) for n, entry in table["tensors"].items()},
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        tag: the folder's name.
        nonce: what the names of its files have in common, 8 hexadecimal digits.
        saved_at: seconds since 1970 when it was begun.
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
        """Of the manifest's file."""
        return f"manifest-{self.nonce}.json"

    def to_json(self) -> bytes:
        """The file's content."""
        table = {
            "format": "spmdzero checkpoint",
            "version": VERSION,
            **{key: getattr(self, key) for key in _OWN},
            **self.description,
            **self.contents.to_json(),
        }
        # With a line for each number the table of a thousand hosts would be twice as long.
        return json.dumps(table, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """What `to_json` wrote."""
        table = json.loads(data)
        return cls(
            **{key: table.pop(key) for key in _OWN},
            contents=Contents.from_json(table),
            description={key: table[key] for key in table.keys() - _NOT_DESCRIBING},
        )


_OWN = ("tag", "nonce", "saved_at", "latest")
_NOT_DESCRIBING = {"format", "version", "states", "files", "tensors"}


def commit_line(manifest: Manifest, data: bytes) -> bytes:
    """The commit file that vouches for `data`, the manifest's content."""
    name, size = manifest.name, len(data)
    return f"spmdzero checkpoint {VERSION}: {name} {size} {checksum(data)}\n".encode()


def committed_nonce(folder: Path) -> str | None:
    """The nonce of the files that a tag's commit file vouches for; None without a valid one."""
    try:
        return _commit_of(folder)[2]
    except SpmdZeroCheckpointError:
        return None


def _commit_of(folder: Path) -> re.Match[str]:
    """The manifest's name, nonce, size and checksum, by a tag's commit file.

    Raises:
        SpmdZeroCheckpointError: no commit, one of a newer format, or altered.
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
    """The manifest of a tag's folder, checked against its commit file; no other file is looked at.

    Raises:
        SpmdZeroCheckpointError: as for the commit file, or the manifest is missing or altered.
    """
    name, _, size, expected = _commit_of(folder).groups()
    path = folder / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) != int(size) or checksum(data) != expected:
        reason = "altered: its checksum is not the one in the commit file"
        raise SpmdZeroCheckpointError(file=path, reason=reason)
    return Manifest.from_json(data)


def unreadable(file: Path, error: Exception) -> SpmdZeroCheckpointError:
    """That a file of a checkpoint is missing, or can't be read."""
    reason = f"can't be read: {getattr(error, 'strerror', None) or error}"
    if isinstance(error, FileNotFoundError):
        reason = "is missing"
    return SpmdZeroCheckpointError(file=file, reason=reason)
