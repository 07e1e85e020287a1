"""Safetensors files written tensor by tensor, while the library needs all tensors in memory.

The format: 8 bytes little-endian length, that much JSON, the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats._boxes import Box, box_shape
from spmdzero.formats._files import appearing, checksum

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
    """A tensor, or a part of one, that is to be written.

    Attributes:
        key: its name in the file.
        box: the part of the tensor that is written.
        dtype: of its elements.
        read: maps the part to its elements.
    """

    key: str
    box: Box
    dtype: torch.dtype
    read: Callable[[Box], torch.Tensor]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(box_shape(self.box)) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """A finished file.

    Attributes:
        size: in bytes.
        header: the checksum of all bytes before the first tensor.
        header_size: the number of these bytes.
        places: for each entry, in order, the offset of its first byte and its checksum.
    """

    size: int
    header: str
    header_size: int
    places: Sequence[tuple[int, str]]


def write_tensors(path: Path, entries: Sequence[Entry], *, metadata: dict[str, str]) -> TensorFile:
    """Writes the file; entries are read and dropped one after the other.

    Raises:
        OSError: as `appearing`.
        SpmdZeroUsageError: safetensors has no code for a dtype.
    """
    header = _header(entries, metadata)
    places: list[tuple[int, str]] = []
    with appearing(path) as file:
        file.write(header)
        for entry in entries:
            # View the bytes, because NumPy has no bfloat16.
            flat = entry.read(entry.box).contiguous().reshape(-1).view(torch.uint8)
            data = flat.numpy().data
            places.append((file.size, checksum(data)))
            file.write(data)
    return TensorFile(
        size=file.size, header=checksum(header), header_size=len(header), places=places
    )


def _header(entries: Sequence[Entry], metadata: dict[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for entry in entries:
        if entry.dtype not in CODES:
            raise SpmdZeroUsageError(
                f"{entry.key} is {entry.dtype}, which a safetensors file can't hold. Convert "
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
