"""Writing a native checkpoint: what is in the folder stays complete until the new one is."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats._failures import PREFIX, shared_failure
from spmdzero.formats._files import checksum, settle, write_whole
from spmdzero.formats._folder import (
    Retention,
    expire,
    newest_complete,
    remove_files,
    remove_leftovers,
    remove_messages,
    remove_written,
    write_latest,
)
from spmdzero.formats._host_file import dump_host
from spmdzero.formats._manifest import (
    COMMIT,
    FileEntry,
    Manifest,
    TensorEntry,
    commit_line,
    committed_nonce,
)
from spmdzero.formats._parts import Part, await_beginning, await_end, await_parts, begin
from spmdzero.formats._state import TrainingState, in_memory
from spmdzero.formats._tensor_file import Entry, write_tensors

_LOCK = ".spmdzero.lock"


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """Where and how one checkpoint is saved; the same in every process but for `process`.

    Attributes:
        folder: of the checkpoints, which all processes see.
        tag: the checkpoint's own folder in it.
        nonce: 8 hexadecimal digits that no save before had.
        latest: whether `latest` shall name it.
        retention: which older ones are deleted afterwards.
        description: what the manifest says of the run: versions, config, plan, mesh, counters.
        process, processes: which of the saving processes this is.
    """

    folder: Path
    tag: str
    nonce: str
    latest: bool
    retention: Retention
    description: Mapping[str, Any]
    process: int = 0
    processes: int = 1


def save_native(state: TrainingState, order: SaveOrder) -> None:
    """Saves this process's part of a state; returns when the checkpoint is complete.

    The commit file appears last, by a rename; a tag that existed keeps its old content until
    then. Tensors are read and written one by one.

    Raises:
        SpmdZeroCheckpointError: no space, no permission, another save into the folder, or another
            process failed: then with its reason, as soon as it has failed. What was there before
            is as it was.
        SpmdZeroUsageError: the state holds what a checkpoint can't.
    """
    with shared_failure(order), _explained(order):
        host = dump_host(state.host)
        os.makedirs(order.folder, exist_ok=True)
        if order.process == 0:
            with _alone(order):
                _save_first(state, host, order)
        else:
            _save_other(state, host, order)


def held_for(order: SaveOrder, state: TrainingState) -> TrainingState:
    """A copy of this process's part of a state, to be saved later.

    Raises what copying it raises, here and in the other processes.
    """
    with shared_failure(order):
        return in_memory(state)


@contextlib.contextmanager
def _explained(order: SaveOrder) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpmdZeroCheckpointError(
            file=error.filename or order.folder / order.tag,
            reason=f"{PREFIX}{error.strerror or error}",
            newest=newest_complete(order.folder),
        ) from error


@contextlib.contextmanager
def _alone(order: SaveOrder) -> Iterator[None]:
    lock = filelock.FileLock(order.folder / _LOCK)
    try:
        # Released by the system when the process dies.
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise SpmdZeroCheckpointError(
            file=order.folder,
            reason="another process is saving into this folder",
            newest=newest_complete(order.folder),
            fix="Give each run a folder of its own",
        ) from error
    try:
        yield
    finally:
        lock.release()


def _save_first(state: TrainingState, host: bytes, order: SaveOrder) -> None:
    path = order.folder / order.tag
    remove_leftovers(order.folder, tag=order.tag, nonce=order.nonce)
    with _undone(order):
        os.makedirs(path, exist_ok=True)
        saved_at = time.time()
        if order.processes > 1:
            begin(order)
        parts = [_write_part(path, state, host, order), *await_parts(order)]
        manifest = _manifest(order, parts, saved_at)
        data = manifest.to_json()
        write_whole(path / manifest.name, [data])
        settle(path)
        settle(order.folder)
        write_whole(path / COMMIT, [commit_line(manifest, data)])
    settle(path)
    if order.latest:
        write_latest(order.folder, order.tag)
    remove_files(path, but=(order.nonce,))
    expire(order.folder, order.retention, saved=order.tag)
    if order.processes > 1:
        remove_messages(path, of=order.nonce)


def _save_other(state: TrainingState, host: bytes, order: SaveOrder) -> None:
    await_beginning(order)
    with _undone(order):
        part = _write_part(order.folder / order.tag, state, host, order)
    # Once it is told of them, the first process may vouch for these files at any time.
    part.write(order)
    await_end(order)


@contextlib.contextmanager
def _undone(order: SaveOrder) -> Iterator[None]:
    """What this process wrote inside is deleted when that fails, and nothing else."""
    path = order.folder / order.tag
    try:
        yield
    except BaseException:
        # Whatever stood in the way of saving may stand in the way of this too.
        with contextlib.suppress(OSError):
            if committed_nonce(path) != order.nonce:
                remove_written(path, nonce=order.nonce, process=order.process)
        raise


def _write_part(path: Path, state: TrainingState, host: bytes, order: SaveOrder) -> Part:
    place = f"{order.nonce}-{order.process:05}-of-{order.processes:05}"
    entries = [
        Entry(
            key=name if len(tensor.pieces) == 1 else f"{name}@{index}",
            tensor=name,
            box=box,
            dtype=tensor.dtype,
            read=tensor.read,
        )
        for name, tensor in state.tensors.items()
        for index, box in enumerate(tensor.pieces)
    ]
    tensors = path / f"tensors-{place}.safetensors"
    written = write_tensors(tensors, entries, metadata={"format": "pt", "tag": order.tag})
    states = path / f"state-{place}.pt"
    write_whole(states, [host])
    return Part(
        state=states.name,
        files={
            tensors.name: FileEntry(
                size=written.size, checksum=written.header, checked=written.header_size
            ),
            states.name: FileEntry(size=len(host), checksum=checksum(host), checked=len(host)),
        },
        tensors={
            name: TensorEntry(
                shape=tensor.shape,
                dtype=tensor.dtype,
                pieces=tuple(written.pieces.get(name, ())),
            )
            for name, tensor in state.tensors.items()
        },
    )


def _manifest(order: SaveOrder, parts: list[Part], saved_at: float) -> Manifest:
    return Manifest(
        tag=order.tag,
        nonce=order.nonce,
        saved_at=saved_at,
        latest=order.latest,
        description=json.loads(json.dumps(order.description)),
        files={name: entry for part in parts for name, entry in part.files.items()},
        states=tuple(part.state for part in parts),
        tensors={
            name: TensorEntry(
                shape=first.shape,
                dtype=first.dtype,
                pieces=tuple(piece for part in parts for piece in part.tensors[name].pieces),
            )
            for name, first in parts[0].tensors.items()
        },
    )
