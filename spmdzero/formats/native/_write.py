"""Writes a native checkpoint: the old content of the folder stays complete until the new one is."""

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats._files import settle, write_whole
from spmdzero.formats._latest import write_latest
from spmdzero.formats._state import TrainingState, in_memory
from spmdzero.formats._tensor_file import Entry, write_tensors
from spmdzero.formats.native._contents import Contents, FileEntry, Piece, TensorEntry
from spmdzero.formats.native._folder import (
    expire,
    newest_complete,
    remove_empty,
    remove_leftovers,
    remove_replaced,
    remove_written,
)
from spmdzero.formats.native._host_file import require_storable, write_host
from spmdzero.formats.native._manifest import COMMIT, Manifest, commit_line, committed_nonce
from spmdzero.formats.native._order import SaveOrder
from spmdzero.formats.native._processes import (
    PREFIX,
    await_beginning,
    await_end,
    await_parts,
    begin,
    end,
    shared_failure,
    tell_part,
)

logger = logging.getLogger("spmdzero")

_NAME = "zero_to_fp32.py"
_TEXT = '''\
#!/usr/bin/env python
"""Writes the fp32 weights of a checkpoint in this folder, where spmdzero is installed.

    python zero_to_fp32.py . OUTPUT_DIR [--safe_serialization] [--tag TAG]
"""

from spmdzero.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


def write_script(folder: Path) -> None:
    """Writes ``zero_to_fp32.py``, in the place of DeepSpeed's; a failure is a warning.

    DeepSpeed's script reads only checkpoints of its own, this one reads both kinds.
    """
    path = folder / _NAME
    try:
        if not path.exists() or path.read_bytes() != _TEXT.encode():
            write_whole(path, _TEXT.encode())
            path.chmod(path.stat().st_mode | stat.S_IEXEC)
    except OSError as error:
        logger.warning(
            "%s can't be written, which is nothing but a shorter way to write `spmdzero convert "
            "%s TARGET --to fp32`: %s", path, folder, error
        )  # fmt: skip


_LOCK = ".spmdzero.lock"
# Engines of one process take turns in a folder: the lock file is for other processes.
_TURNS: dict[str, threading.Lock] = {}
os.register_at_fork(after_in_child=_TURNS.clear)


def save_native(state: TrainingState, order: SaveOrder) -> None:
    """Saves this process's part of a state; returns when the checkpoint is complete.

    The commit file appears last, by a rename; a tag that existed keeps its old content until
    then. Tensors are read and written one by one.

    Raises:
        SpmdZeroCheckpointError: no space, no permission, another save into the folder, or a
            failure of another process, with its reason and as soon as it has failed. The former
            content of the folder is unchanged.
        SpmdZeroUsageError: the state holds a value that a checkpoint can't.
    """
    with shared_failure(order):
        try:
            require_storable(state.host)
            os.makedirs(order.folder, exist_ok=True)
            if order.process:
                _save_other(state, order)
                return
            turn = _TURNS.setdefault(os.path.realpath(order.folder), threading.Lock())
            # The system releases the lock when the process dies.
            with turn, filelock.FileLock(order.folder / _LOCK, timeout=0):
                _save_first(state, order)
        except filelock.Timeout as error:
            raise SpmdZeroCheckpointError(
                file=order.folder,
                reason="another process is saving into this folder",
                newest=newest_complete(order.folder),
                fix="Give each run a folder of its own",
            ) from error
        except OSError as error:
            raise SpmdZeroCheckpointError(
                file=error.filename or order.path,
                reason=f"{PREFIX}{error.strerror or error}",
                newest=newest_complete(order.folder),
            ) from error


def held_for(order: SaveOrder, state: TrainingState) -> TrainingState:
    """A copy of this process's part of a state, to be saved later as it is now.

    An error in copying is raised here and in the other processes.
    """
    with shared_failure(order):
        require_storable(state.host)
        return in_memory(state)


def _save_first(state: TrainingState, order: SaveOrder) -> None:
    path, saved_at = order.path, time.time()
    remove_leftovers(order.folder)
    with _undone(order):
        begin(order)
        os.makedirs(path, exist_ok=True)
        manifest = Manifest(
            tag=order.tag,
            nonce=order.nonce,
            saved_at=saved_at,
            latest=order.latest,
            description=order.description,
            contents=Contents.joined([_write_part(state, order), *await_parts(order)]),
        )
        data = manifest.to_json()
        write_whole(path / manifest.name, data)
        settle(path)
        settle(order.folder)
        write_whole(path / COMMIT, commit_line(manifest, data))
    settle(path)
    if order.latest:
        write_latest(order.folder, order.tag)
    write_script(order.folder)
    try:
        remove_replaced(path, by=order.nonce)
        expire(order.folder, order.retention, saved=order.tag)
    except (OSError, SpmdZeroCheckpointError) as error:
        logger.warning("%s is saved, but what it replaces can't be deleted: %s", path, error)
    end(order)


def _save_other(state: TrainingState, order: SaveOrder) -> None:
    await_beginning(order)
    with _undone(order):
        # The first process has begun, and may not have come to this yet.
        os.makedirs(order.path, exist_ok=True)
        part = _write_part(state, order)
    # From here on the first process may vouch for these files at any time.
    tell_part(order, part)
    await_end(order)


@contextlib.contextmanager
def _undone(order: SaveOrder) -> Iterator[None]:
    """Context that deletes the files that this process wrote in it if it fails, and no others."""
    try:
        yield
    except BaseException:
        # Deleting may fail for the same reason as the save: the next save knows what to
        # remove.
        with contextlib.suppress(OSError):
            if order.path.is_dir() and committed_nonce(order.path) != order.nonce:
                remove_written(order.path, nonce=order.nonce, process=order.process)
                if order.processes == 1:
                    # Others may still be writing into the shared folder.
                    remove_empty(order.path)
            if order.processes == 1:
                end(order)
        raise


def _write_part(state: TrainingState, order: SaveOrder) -> Contents:
    place = f"{order.nonce}-{order.process:05}-of-{order.processes:05}"
    parts = [(name, box) for name, tensor in state.tensors.items() for box in tensor.pieces]
    entries = [
        Entry(
            key=name if len(tensor.pieces) == 1 else f"{name}@{index}",
            box=box,
            dtype=tensor.dtype,
            read=tensor.read,
        )
        for name, tensor in state.tensors.items()
        for index, box in enumerate(tensor.pieces)
    ]
    tensors = order.path / f"tensors-{place}.safetensors"
    written = write_tensors(tensors, entries, metadata={"format": "pt", "tag": order.tag})
    pieces: dict[str, list[Piece]] = {name: [] for name in state.tensors}
    for (name, box), (offset, digest) in zip(parts, written.places, strict=True):
        pieces[name].append(Piece(tensors.name, offset, box, digest))
    states = order.path / f"state-{place}.pt"
    size, digest = write_host(state.host, states)
    return Contents(
        states=(states.name,),
        files={
            tensors.name: FileEntry(
                size=written.size, checksum=written.header, checked=written.header_size
            ),
            states.name: FileEntry(size=size, checksum=digest, checked=size),
        },
        tensors={
            name: TensorEntry(shape=tensor.shape, dtype=tensor.dtype, pieces=tuple(pieces[name]))
            for name, tensor in state.tensors.items()
        },
    )
