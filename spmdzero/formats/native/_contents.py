"""The contents of a native checkpoint's files."""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spmdzero.formats._boxes import Box
from spmdzero.formats._tensor_file import CODES, DTYPES

_FILE = r"(?:tensors|state)-{nonce}-[0-9]{{5}}-of-[0-9]{{5}}\.(?:safetensors|pt)"


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """The size and checksum of one file.

    Attributes:
        size: in bytes.
        checksum: of its first `checked` bytes.
        checked: the whole size for a file of host state; the header's size for a file of tensors,
            whose pieces have their own checksums.
    """

    size: int
    checksum: str
    checked: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The place of one part of a tensor in a checkpoint's files.

    Attributes:
        file: the file's name.
        offset: of the first byte.
        box: the part of the tensor.
        checksum: of the bytes.
    """

    file: str
    offset: int
    box: Box
    checksum: str


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor and the places of its pieces."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON values for `from_json`."""
        pieces = [[p.file, p.offset, p.box, p.checksum] for p in self.pieces]
        return {"dtype": CODES[self.dtype], "shape": self.shape, "pieces": pieces}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "TensorEntry":
        """The entry that `to_json` wrote."""
        return cls(
            shape=tuple(entry["shape"]),
            dtype=DTYPES[entry["dtype"]],
            pieces=tuple(
                # Intern the name: each file has about a thousand pieces.
                Piece(sys.intern(file), offset, tuple((start, stop) for start, stop in box), digest)
                for file, offset, box, digest in entry["pieces"]
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a checkpoint's files, or of those that one of the saving processes wrote.

    Attributes:
        states: the files of host state, in the order of the processes.
        files: all files by name, except the manifest itself.
        tensors: all tensors by name, with the pieces that are in the files.
    """

    states: tuple[str, ...]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def joined(cls, parts: list["Contents"]) -> "Contents":
        """The contents of all processes' files, in their order."""
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
        """The contents as JSON values for `from_json`."""
        return {
            "states": self.states,
            "files": {name: vars(entry) for name, entry in self.files.items()},
            "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
        }

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Contents":
        """The contents that `to_json` wrote; other keys of the table are ignored."""
        return cls(
            states=tuple(table["states"]),
            files={name: FileEntry(**entry) for name, entry in table["files"].items()},
            tensors={n: TensorEntry.from_json(entry) for n, entry in table["tensors"].items()},
        )

    def check(self, *, nonce: str) -> None:
        """Checks that only files of this nonce are named, and that their pieces form the tensors.

        Raises:
            ValueError: another file is named, or pieces are missing.
        """
        files, own = self.files, re.compile(_FILE.format(nonce=nonce))
        require(bool(self.states), "it has no host state")
        for name, file in files.items():
            require(own.fullmatch(name) is not None, f"the file {name!r} is not its own")
            require(_counts(file.size, file.checked) and file.checked <= file.size, f"{name}")
        for name in self.states:
            require(name in files, f"the file {name!r} is not its own")
        for name, entry in self.tensors.items():
            require(_counts(*entry.shape), f"{name} has the shape {entry.shape}")
            rest = math.prod(entry.shape)
            for piece in entry.pieces:
                require(piece.file in files, f"the file {piece.file!r} is not its own")
                sizes = [stop - start for start, stop in piece.box]
                bounds = [number for interval in piece.box for number in interval]
                inside = _counts(piece.offset, *sizes, *bounds) and all(
                    stop <= size for (_, stop), size in zip(piece.box, entry.shape, strict=True)
                )
                end = piece.offset + math.prod(sizes) * entry.dtype.itemsize
                require(inside and end <= files[piece.file].size, f"a piece of {name}")
                rest -= math.prod(sizes)
            require(rest == 0, f"the pieces of {name} don't make it")


def require(holds: bool, otherwise: str) -> None:
    """Raises ValueError with the text `otherwise` unless `holds`."""
    if not holds:
        raise ValueError(otherwise)


def _counts(*numbers: object) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)
