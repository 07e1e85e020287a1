"""Cooperation of several hosts' processes on one checkpoint, by files in their shared folder.

Collectives won't do: the saving thread would meet the training's collectives in a different order
on each host. The messages are files in the hidden folder of the save. `begun` says that the folder
of checkpoints belongs to this save, `part-<process>` has what a process has written, and
`failed-<process>` the reason why it couldn't. When all is done, the first process removes the
hidden folder. If a process failed, the folder stays until no process can be waiting any more.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmdzero.errors import SpmdZeroCheckpointError, SpmdZeroError
from spmdzero.formats._files import write_whole
from spmdzero.formats.native._contents import Contents
from spmdzero.formats.native._folder import newest_complete
from spmdzero.formats.native._manifest import committed_nonce
from spmdzero.formats.native._order import SaveOrder
from spmdzero.formats.native._unfinished import BEGUN, PATIENCE, forget, note, place_of

PREFIX = "can't be saved: "
_PAUSE = 0.05


@contextlib.contextmanager
def shared_failure(order: SaveOrder) -> Iterator[None]:
    """Context whose errors the other processes raise, too, when they next wait for another.

    All work that a process does alone for a save belongs inside, because the others would wait.
    """
    try:
        yield
    except BaseException as error:
        # A process that fails because another did has nothing to add.
        if order.processes > 1 and not _failures(order):
            # If this process can't write into the folder, which may be the failure, it can't tell.
            with contextlib.suppress(OSError):
                _tell(order, f"failed-{order.process:05}", _said(order, error))
        raise


def begin(order: SaveOrder) -> None:
    """Tells the others, in the first process, that they may write into the folder.

    Also tells the next save which tag they write, so that it can remove what this one leaves.
    """
    note(order.folder, order.nonce, tag=order.tag, processes=order.processes)


def await_beginning(order: SaveOrder) -> None:
    """Waits until the first process has the folder for this save.

    Before that the folder may belong to another run, whose files must not be mixed with these.

    Raises:
        SpmdZeroCheckpointError: a process failed, or the first one doesn't begin.
    """
    for _ in _waiting(order, "the first process has not begun it"):
        if (_messages(order) / BEGUN).exists():
            return


def tell_part(order: SaveOrder, part: Contents) -> None:
    """Tells the first process what this one has written."""
    _tell(order, _part(order.process), part.to_json())


def await_parts(order: SaveOrder) -> list[Contents]:
    """The contents that the other processes have written; waits for all of them.

    Raises:
        SpmdZeroCheckpointError: a process failed, or takes too long.
    """
    parts: list[Contents] = []
    for process in range(1, order.processes):
        file = _messages(order) / _part(process)
        for _ in _waiting(order, f"another process has not written {file.name}"):
            if file.exists():
                parts.append(Contents.from_json(json.loads(file.read_bytes())))
                break
    return parts


def end(order: SaveOrder) -> None:
    """Tells the others, in the first process, that all is done."""
    forget(order.folder, order.nonce)


def await_end(order: SaveOrder) -> None:
    """Waits until the first process has completed the save.

    Raises:
        SpmdZeroCheckpointError: a process failed, or takes too long.
    """
    for _ in _waiting(order, "the first process has not completed it"):
        if not _messages(order).exists():
            break
    if committed_nonce(order.path) != order.nonce:
        raise _given_up(order, "another save has taken its place")


def _messages(order: SaveOrder) -> Path:
    return place_of(order.folder, order.nonce)


def _part(process: int) -> str:
    return f"part-{process:05}.json"


def _tell(order: SaveOrder, name: str, content: Any) -> None:
    os.makedirs(_messages(order), exist_ok=True)
    write_whole(_messages(order) / name, json.dumps(content).encode())


def _failures(order: SaveOrder) -> list[Path]:
    files = (_messages(order) / f"failed-{process:05}" for process in range(order.processes))
    return [file for file in files if file.exists()]


def _said(order: SaveOrder, error: BaseException) -> dict[str, Any]:
    by = f"{PREFIX}process {order.process}: "
    if isinstance(error, SpmdZeroCheckpointError):
        said = {key: getattr(error, key) for key in ("file", "newest", "fix")}
        return said | {"reason": by + error.reason.removeprefix(PREFIX)}
    known = isinstance(error, SpmdZeroError)
    reason = by + (str(error) if known else f"{type(error).__name__}: {error}")
    return {"file": str(order.path), "newest": newest_complete(order.folder), "reason": reason}


def _waiting(order: SaveOrder, overdue: str) -> Iterator[None]:
    """Yields repeatedly, until a process has failed or the wait takes too long."""
    end = time.monotonic() + PATIENCE
    while True:
        yield
        for report in _failures(order):
            raise SpmdZeroCheckpointError(**json.loads(report.read_bytes()))
        if time.monotonic() > end:
            raise _given_up(order, f"{overdue} within {PATIENCE:g} s")
        time.sleep(_PAUSE)


def _given_up(order: SaveOrder, reason: str) -> SpmdZeroCheckpointError:
    return SpmdZeroCheckpointError(file=order.path, reason=f"{PREFIX}{reason}")
