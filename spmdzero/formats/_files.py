"""Files that appear whole or not at all, and survive a power cut once they have appeared."""

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xxhash

Bytes: TypeAlias = bytes | bytearray | memoryview

_BLOCK = 1 << 22


def checksum(data: Bytes) -> str:
    """XXH3, 128 bits, as 32 hexadecimal digits: at the speed of memory, not cryptographic."""
    return xxhash.xxh3_128_hexdigest(data)


class GrowingFile:
    """An open file that is written from start to end.

    Attributes:
        size: number of bytes written so far.
    """

    def __init__(self, handle: int) -> None:
        self._handle, self.size = handle, 0

    def write(self, data: Bytes) -> int:
        """Appends all of `data`; returns its length."""
        rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while rest:
            written = os.write(self._handle, rest)
            self.size += written
            rest = rest[written:]
        return len(data)

    def flush(self) -> None:
        """Does nothing, as nothing is held back; `torch.save` calls it."""


class _Hashed:
    """A file for `torch.save`, which keeps the `checksum` of the written bytes.

    Attributes:
        failed: the error of a failed write, which torch's writer replaces by its own.
    """

    def __init__(self, file: GrowingFile) -> None:
        self._file, self.digest = file, xxhash.xxh3_128()
        self.flush = file.flush
        self.failed: OSError | None = None

    def write(self, data: Bytes) -> int:
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.failed = error
            raise


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[GrowingFile]:
    """Opens the file `path` for writing; it appears under its name when the body has finished.

    Raises:
        OSError: no space, no permission, ...; a file that `path` named before is as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        try:
            yield GrowingFile(handle)
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


def write_whole(path: Path, data: Bytes) -> None:
    """Writes `data` as the file `path`; raises as `appearing`."""
    with appearing(path) as file:
        file.write(data)


def save_torch(content: Any, path: Path, *, pickle_module: Any = pickle) -> tuple[int, str]:
    """Writes a file with `torch.save`, and its folder if need be; raises as `appearing`.

    Returns the file's size in bytes and its checksum. Tensors go to the file without a copy.
    """
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path) as file:
        hashed = _Hashed(file)
        try:
            torch.save(content, hashed, pickle_module=pickle_module)  # type: ignore[bad-argument-type]
        except RuntimeError as error:
            if hashed.failed is None:
                raise
            raise hashed.failed from error
    return file.size, hashed.digest.hexdigest()


def settle(folder: Path) -> None:
    """Puts the names of a folder's files into stable storage."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_range(path: Path, offset: int, count: int) -> bytearray:
    """Reads `count` bytes of a file, from `offset`.

    Raises:
        OSError: the file can't be read, or is shorter.
    """
    data = bytearray(count)
    with path.open("rb") as file:
        file.seek(offset)
        missing = count - file.readinto(data)
    if missing:
        raise OSError(f"ends {missing} bytes early")
    return data


def checksum_of_range(path: Path, offset: int, count: int) -> str:
    """The `checksum` of a part of a file, read block by block; raises as `read_range`."""
    digest, end = xxhash.xxh3_128(), offset + count
    for start in range(offset, end, _BLOCK):
        digest.update(read_range(path, start, min(_BLOCK, end - start)))
    return digest.hexdigest()
