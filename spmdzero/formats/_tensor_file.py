"""A safetensors file, written tensor by tensor: the library wants them all in memory at once.

The format: 8 bytes little-endian length, that much JSON, the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats._boxes import Box, box_shape
from spmdzero.formats._files import Bytes, checksum, write_whole

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor to be written.

    Attributes:
        key: its name in the file.
        tensor: the name of the tensor that it is a part of.
        box: which part.
        dtype: of its elements.
        read: the part -> its elements.
    """

    key: str
    tensor: str
    box: Box
    dtype: torch.dtype
    read: Callable[[Box], torch.Tensor]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(box_shape(self.box)) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
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

    def to_json(self) -> list[Any]:
        """What `from_json` reads."""
        return [self.file, self.offset, [list(ends) for ends in self.box], self.checksum]

    @classmethod
    def from_json(cls, value: list[Any]) -> "Piece":
        """The piece that `to_json` wrote."""
        file, offset, box, digest = value
        return cls(
            file=str(file),
            offset=int(offset),
            box=tuple((int(start), int(stop)) for start, stop in box),
            checksum=str(digest),
        )


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """What a finished file holds.

    Attributes:
        size: in bytes.
        header: the checksum of all bytes before the first tensor's.
        header_size: their number.
        pieces: tensor name -> its pieces in this file.
    """

    size: int
    header: str
    header_size: int
    pieces: Mapping[str, list[Piece]]


def write_tensors(path: Path, entries: Iterable[Entry], *, metadata: dict[str, str]) -> TensorFile:
    """Writes the file; one entry after the other is read and dropped.

    Raises:
        OSError: as `write_whole`.
        SpmdZeroUsageError: a dtype that safetensors has no code for.
    """
    entries = list(entries)
    header = _header(entries, metadata)
    pieces: dict[str, list[Piece]] = {}

    def parts() -> Iterator[Bytes]:
        yield header
        offset = len(header)
        for entry in entries:
            data = _bytes(entry.read(entry.box))
            pieces.setdefault(entry.tensor, []).append(
                Piece(file=path.name, offset=offset, box=entry.box, checksum=checksum(data))
            )
            offset += entry.size
            yield data

    size = write_whole(path, parts())
    return TensorFile(size=size, header=checksum(header), header_size=len(header), pieces=pieces)


def _header(entries: list[Entry], metadata: dict[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for entry in entries:
        if entry.dtype not in CODES:
            raise SpmdZeroUsageError(
                f"{entry.tensor} is {entry.dtype}, which a safetensors file can't hold. Convert "
                "it, or leave it out of the module's state (a non-persistent buffer)"
            )
        table[entry.key] = {
            "dtype": CODES[entry.dtype],
            "shape": list(box_shape(entry.box)),
            "data_offsets": [offset, offset + entry.size],
        }
        offset += entry.size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: torch.Tensor) -> memoryview:
    # numpy has no bfloat16.
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
