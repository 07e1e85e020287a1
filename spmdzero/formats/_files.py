"""Files that appear whole or not at all, and survive a power cut once they have appeared."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import xxhash

Bytes: TypeAlias = bytes | memoryview

_TEMPORARY = ".tmp"
_BLOCK = 1 << 22


def checksum(data: Bytes) -> str:
    """XXH3, 128 bits, as 32 hexadecimal digits: at the speed of memory, not cryptographic."""
    return xxhash.xxh3_128_hexdigest(data)


def write_whole(path: Path, parts: Iterable[Bytes]) -> int:
    """Writes `parts` one after the other as the file `path`; returns its size in bytes.

    Under a temporary name first, in stable storage before it gets its own.

    Raises:
        OSError: no space, no permission, ...; a file that `path` named before is as it was.
    """
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    size = 0
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        try:
            for part in parts:
                rest = memoryview(part).cast("B") if len(part) else memoryview(b"")
                while rest:
                    written = os.write(handle, rest)
                    size += written
                    rest = rest[written:]
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a failed write knows only its handle
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return size


def settle(folder: Path) -> None:
    """Puts the names of a folder's files into stable storage."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_range(path: Path, offset: int, count: int) -> bytearray:
    """`count` bytes of a file, from `offset`.

    Raises:
        OSError: the file can't be read, or is shorter.
    """
    data = bytearray(count)
    view = memoryview(data)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while view:
            read = file.readinto(view)
            if not read:
                raise OSError(f"ends {len(view)} bytes early")
            view = view[read:]
    return data


def checksum_of_range(path: Path, offset: int, count: int) -> str:
    """`checksum` of a part of a file, of which only a block is in memory at a time.

    Raises:
        OSError: the file can't be read, or is shorter.
    """
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(min(count, _BLOCK)))
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while count:
            read = file.readinto(block[: min(count, len(block))])
            if not read:
                raise OSError(f"ends {count} bytes early")
            digest.update(block[:read])
            count -= read
    return digest.hexdigest()
