"""Reading a native checkpoint: everything is checked before anything is used."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats._boxes import Box, assemble, box_shape, meet
from spmdzero.formats._files import checksum, checksum_of_range, read_range
from spmdzero.formats._folder import newest_complete
from spmdzero.formats._host_file import load_host
from spmdzero.formats._manifest import Manifest, TensorEntry, read_manifest
from spmdzero.formats._state import HostState, StoredTensor, TrainingState
from spmdzero.formats._tensor_file import Piece

_READERS = min(4, os.cpu_count() or 1)


def read_native(folder: Path, tag: str, *, process: int = 0) -> TrainingState:
    """The state in `folder / tag`; tensors are read, and checked, when they are asked for.

    Args:
        folder: of the checkpoints.
        tag: which of them.
        process: whose host state. One that the saving run did not have gets the first one's, but
            without the generators of which the saving processes had each its own.

    Raises:
        SpmdZeroCheckpointError: not complete, or a file is missing or altered.
    """
    path = folder / tag
    try:
        manifest = read_manifest(path)
        host = _check_files(path, manifest, process)
    except SpmdZeroCheckpointError as error:
        raise _with_newest(error, folder, tag) from error
    source = _Source(folder=folder, tag=tag, manifest=manifest)
    return TrainingState(
        tensors={
            name: StoredTensor(
                shape=entry.shape,
                dtype=entry.dtype,
                read=lambda box, entry=entry: source.read(entry, box),
                pieces=tuple(piece.box for piece in entry.pieces),
            )
            for name, entry in manifest.tensors.items()
        },
        host=host,
        source=str(path),
        check=source.check,
    )


def _with_newest(error: SpmdZeroCheckpointError, folder: Path, tag: str) -> SpmdZeroCheckpointError:
    return SpmdZeroCheckpointError(
        file=error.file, reason=error.reason, newest=newest_complete(folder, but=tag)
    )


def _check_files(path: Path, manifest: Manifest, process: int) -> HostState:
    for name, entry in manifest.files.items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != entry.size:
                raise _broken(file, f"has {size} bytes instead of {entry.size}")
            if checksum_of_range(file, 0, entry.checked) != entry.checksum:
                raise _altered(file)
        except OSError as error:
            raise _broken(file, _why(error)) from error
    return _host_of(process, path, manifest)


def _host_of(process: int, path: Path, manifest: Manifest) -> HostState:
    names = manifest.states
    if process < len(names):
        return _read_host(path / names[process], manifest)
    first, *others = (_read_host(path / name, manifest) for name in names)
    # With a generator of the first one's it would repeat that host's noise.
    shared = {
        name: state
        for name, state in (first.rng or {}).items()
        if all(_same(state, (other.rng or {}).get(name)) for other in others)
    }
    return dataclasses.replace(first, rng=None if first.rng is None else shared)


def _read_host(file: Path, manifest: Manifest) -> HostState:
    try:
        data = file.read_bytes()
        if checksum(data) != manifest.files[file.name].checksum:
            raise _altered(file)
        return load_host(data)
    except (OSError, ValueError) as error:
        raise _broken(file, f"can't be read: {error}") from error


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    return a == b


def _check_pieces(path: Path, pieces: Iterable[Piece], manifest: Manifest) -> None:
    sizes = {
        (piece.file, piece.offset): _size(entry, piece)
        for entry in manifest.tensors.values()
        for piece in entry.pieces
    }

    def check(piece: Piece) -> None:
        file = path / piece.file
        try:
            found = checksum_of_range(file, piece.offset, sizes[piece.file, piece.offset])
        except OSError as error:
            raise _broken(file, _why(error)) from error
        if found != piece.checksum:
            raise _altered(file)

    # Both the checksum and the reading leave Python to other threads.
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        for _ in pool.map(check, pieces):
            pass


def _size(entry: TensorEntry, piece: Piece) -> int:
    return torch.Size(box_shape(piece.box)).numel() * entry.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class _Source:
    folder: Path
    tag: str
    manifest: Manifest

    def check(self, parts: Mapping[str, Iterable[Box]]) -> None:
        """Raises SpmdZeroCheckpointError unless the pieces that hold these parts are unaltered."""
        needed = [
            piece
            for name, boxes in parts.items()
            for piece in self.manifest.tensors[name].pieces
            if any(meet(piece.box, box) is not None for box in boxes)
        ]
        try:
            _check_pieces(self.folder / self.tag, needed, self.manifest)
        except SpmdZeroCheckpointError as error:
            raise _with_newest(error, self.folder, self.tag) from error

    def read(self, entry: TensorEntry, box: Box) -> torch.Tensor:
        found = (
            self._read_rows(entry, piece, common)
            for piece in entry.pieces
            if (common := meet(piece.box, box)) is not None
        )
        return assemble(box, found, dtype=entry.dtype)

    def _read_rows(self, entry: TensorEntry, piece: Piece, wanted: Box) -> tuple[Box, torch.Tensor]:
        """The part of a piece that has all of `wanted`, and is contiguous in the file."""
        if not wanted:
            rows: Box = ()
            skipped = 0
        else:
            rows = (wanted[0], *piece.box[1:])
            row = torch.Size(box_shape(rows)[1:]).numel() * entry.dtype.itemsize
            skipped = (wanted[0][0] - piece.box[0][0]) * row
        file = self.folder / self.tag / piece.file
        count = torch.Size(box_shape(rows)).numel() * entry.dtype.itemsize
        try:
            data = read_range(file, piece.offset + skipped, count)
        except OSError as error:
            raise _broken(file, _why(error)) from error
        flat = torch.frombuffer(data, dtype=entry.dtype) if count else torch.empty(
            0, dtype=entry.dtype
        )  # fmt: skip
        return rows, flat.reshape(box_shape(rows))


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return f"can't be read: {error.strerror or error}"


def _altered(file: Path) -> SpmdZeroCheckpointError:
    return _broken(file, "altered: its checksum is not the one that was written")


def _broken(file: Path, reason: str) -> SpmdZeroCheckpointError:
    return SpmdZeroCheckpointError(file=file, reason=reason, newest=None)
