"""The table of contents of a native checkpoint, and the commit file that vouches for it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats._files import checksum
from spmdzero.formats._tensor_file import CODES, DTYPES, Piece

VERSION = 1
COMMIT = "COMMITTED"
_LINE = "spmdzero checkpoint {version}: {manifest} {size} {checksum}\n"
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


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor and where its pieces stand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        tag: the folder's name.
        nonce: what the names of its files have in common, 8 hexadecimal digits.
        saved_at: seconds since 1970 when it was begun.
        latest: whether `latest` was to name it.
        description: for people and tools: versions, config, plan, mesh, counters.
        files: by name, without the manifest itself.
        states: the files of host state, in the order of the processes.
        tensors: by name.
    """

    tag: str
    nonce: str
    saved_at: float
    latest: bool
    description: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    states: tuple[str, ...]
    tensors: Mapping[str, TensorEntry]

    @property
    def name(self) -> str:
        """Of the manifest's file."""
        return f"manifest-{self.nonce}.json"

    def to_json(self) -> bytes:
        """The file's content."""
        table = {
            "format": "spmdzero checkpoint",
            "version": VERSION,
            "tag": self.tag,
            "nonce": self.nonce,
            "saved_at": self.saved_at,
            "latest": self.latest,
            **self.description,
            "states": list(self.states),
            "files": {name: vars(entry) for name, entry in self.files.items()},
            "tensors": {
                name: {
                    "dtype": CODES[entry.dtype],
                    "shape": list(entry.shape),
                    "pieces": [piece.to_json() for piece in entry.pieces],
                }
                for name, entry in self.tensors.items()
            },
        }
        return json.dumps(table, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """What `to_json` wrote."""
        table = json.loads(data)
        known = ("tag", "nonce", "saved_at", "latest", "states", "files", "tensors")
        return cls(
            tag=table["tag"],
            nonce=table["nonce"],
            saved_at=table["saved_at"],
            latest=table["latest"],
            description={
                key: value
                for key, value in table.items()
                if key not in (*known, "format", "version")
            },
            files={name: FileEntry(**entry) for name, entry in table["files"].items()},
            states=tuple(table["states"]),
            tensors={
                name: TensorEntry(
                    shape=tuple(entry["shape"]),
                    dtype=DTYPES[entry["dtype"]],
                    pieces=tuple(Piece.from_json(piece) for piece in entry["pieces"]),
                )
                for name, entry in table["tensors"].items()
            },
        )


def commit_line(manifest: Manifest, data: bytes) -> bytes:
    """The commit file that vouches for `data`, the manifest's content."""
    line = _LINE.format(
        version=VERSION, manifest=manifest.name, size=len(data), checksum=checksum(data)
    )
    return line.encode()


def committed_nonce(folder: Path) -> str | None:
    """The nonce of the files that a tag's commit file vouches for; None without a valid one."""
    try:
        found = _COMMITTED.fullmatch((folder / COMMIT).read_bytes().decode("ascii", "replace"))
    except OSError:
        return None
    return found[2] if found else None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a tag's folder, checked against its commit file; no other file is looked at.

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
        raise _broken(folder, reason) from None
    except OSError as error:
        raise _broken(commit, f"can't be read: {error.strerror}") from error
    found = _COMMITTED.fullmatch(line)
    if found is None:
        newer = _NEWER.match(line)
        if newer and int(newer[1]) > VERSION:
            raise _broken(
                commit, f"format {newer[1]} is newer than the {VERSION} that this spmdzero reads"
            )
        raise _broken(commit, "altered: this is not what a commit file says")
    path = folder / found[1]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _broken(path, f"can't be read: {error.strerror}") from error
    if len(data) != int(found[3]) or checksum(data) != found[4]:
        raise _broken(path, "altered: its checksum is not the one in the commit file")
    return Manifest.from_json(data)


def _broken(file: Path, reason: str) -> SpmdZeroCheckpointError:
    return SpmdZeroCheckpointError(file=file, reason=reason, newest=None)
