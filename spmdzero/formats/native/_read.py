"""Reads a native checkpoint: all parts are checked before they are used."""

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats._boxes import Box, assemble, box_shape, meet
from spmdzero.formats._files import checksum_of_range, read_range
from spmdzero.formats._state import HostState, StoredTensor, TrainingState
from spmdzero.formats.native._contents import Contents, Piece, TensorEntry
from spmdzero.formats.native._host_file import read_host
from spmdzero.formats.native._manifest import read_manifest, unreadable

_READERS = min(4, os.cpu_count() or 1)


def read_native(path: Path, *, process: int = 0) -> TrainingState:
    """The state in a tag's folder; tensors are read, and checked, when they are asked for.

    Args:
        path: the folder.
        process: the process whose host state is read. If the saving run didn't have it, it gets
            the first one's state, without generators that differed between the processes.

    Raises:
        SpmdZeroCheckpointError: not complete, or a file is missing or altered.
    """
    contents = read_manifest(path).contents
    for name, entry in contents.files.items():
        file = path / name
        try:
            size = file.stat().st_size
        except OSError as error:
            raise unreadable(file, error) from error
        if size != entry.size:
            reason = f"has {size} bytes instead of {entry.size}"
            raise SpmdZeroCheckpointError(file=file, reason=reason)
        _require(file, 0, entry.checked, entry.checksum)
    return TrainingState(
        tensors={
            name: StoredTensor(
                shape=entry.shape,
                dtype=entry.dtype,
                read=lambda box, entry=entry: _read(path, entry, box),
                pieces=tuple(piece.box for piece in entry.pieces),
            )
            for name, entry in contents.tensors.items()
        },
        host=_host_of(process, path, contents),
        source=str(path),
        check=lambda parts: _check(path, contents, parts),
    )


def _host_of(process: int, path: Path, contents: Contents) -> HostState:
    names = contents.states
    if process < len(names):
        return _read_host(path / names[process])
    first, *others = (_read_host(path / name) for name in names)
    # With the first host's generators another host would repeat that host's noise.
    shared = {
        name: state
        for name, state in (first.rng or {}).items()
        if all(_same(state, (other.rng or {}).get(name)) for other in others)
    }
    return dataclasses.replace(first, rng=None if first.rng is None else shared)


def _read_host(file: Path) -> HostState:
    try:
        return read_host(file)
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    return a == b


def _check(path: Path, contents: Contents, parts: Mapping[str, Iterable[Box]]) -> None:
    """Raises SpmdZeroCheckpointError unless the pieces that hold these parts are unaltered."""
    needed = [
        (piece, piece.offset, _bytes(contents.tensors[name], piece.box), piece.checksum)
        for name, boxes in parts.items()
        for piece in contents.tensors[name].pieces
        if any(meet(piece.box, box) is not None for box in boxes)
    ]
    # Checksums and reads release Python's lock, so that threads help.
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        for _ in pool.map(lambda item: _require(path / item[0].file, *item[1:]), needed):
            pass


def _require(file: Path, offset: int, count: int, expected: str) -> None:
    try:
        found = checksum_of_range(file, offset, count)
    except OSError as error:
        raise unreadable(file, error) from error
    if found != expected:
        raise _altered(file)


def _read(path: Path, entry: TensorEntry, box: Box) -> torch.Tensor:
    found = (
        _read_rows(path, entry, piece, common)
        for piece in entry.pieces
        if (common := meet(piece.box, box)) is not None
    )
    return assemble(box, found, dtype=entry.dtype)


def _read_rows(
    path: Path, entry: TensorEntry, piece: Piece, wanted: Box
) -> tuple[Box, torch.Tensor]:
    """The part of a piece that includes all of `wanted`, and is contiguous in the file."""
    rows, before = wanted, 0
    if wanted:
        rows = (wanted[0], *piece.box[1:])
        before = _bytes(entry, ((piece.box[0][0], wanted[0][0]), *piece.box[1:]))
    file = path / piece.file
    try:
        data = read_range(file, piece.offset + before, _bytes(entry, rows))
    except OSError as error:
        raise unreadable(file, error) from error
    return rows, torch.frombuffer(data, dtype=entry.dtype).reshape(box_shape(rows))


def _bytes(entry: TensorEntry, box: Box) -> int:
    return math.prod(box_shape(box)) * entry.dtype.itemsize


def _altered(file: Path) -> SpmdZeroCheckpointError:
    reason = "altered: its checksum is not the one that was written"
    return SpmdZeroCheckpointError(file=file, reason=reason)
