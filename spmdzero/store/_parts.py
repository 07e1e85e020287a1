"""How the processes of several hosts make one checkpoint: by files in the folder they share.

No collective: the saving thread would meet the training's collectives in another order on each
host.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.store._files import write_whole
from spmdzero.store._manifest import FileEntry, TensorEntry, committed_nonce
from spmdzero.store._tensor_file import CODES, DTYPES, Piece

_PATIENCE = 1800.0
"""Seconds in which the slowest host must have written its part."""
_PAUSE = 0.05


class _Order(Protocol):
    @property
    def nonce(self) -> str: ...
    @property
    def process(self) -> int: ...
    @property
    def processes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one process has written.

    Attributes:
        state: the file of its host state.
        files: its files by name.
        tensors: all tensors by name, with the pieces that it has written.
    """

    state: str
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]

    def write(self, path: Path, order: _Order) -> None:
        """Tells the first process."""
        table = {
            "state": self.state,
            "files": {name: vars(entry) for name, entry in self.files.items()},
            "tensors": {
                name: [
                    list(entry.shape),
                    CODES[entry.dtype],
                    [piece.to_json() for piece in entry.pieces],
                ]
                for name, entry in self.tensors.items()
            },
        }
        write_whole(_name(path, order.nonce, order.process), [json.dumps(table).encode()])

    @classmethod
    def read(cls, file: Path) -> "Part":
        """What `write` wrote."""
        table = json.loads(file.read_bytes())
        return cls(
            state=table["state"],
            files={name: FileEntry(**entry) for name, entry in table["files"].items()},
            tensors={
                name: TensorEntry(
                    shape=tuple(shape),
                    dtype=DTYPES[code],
                    pieces=tuple(Piece.from_json(piece) for piece in pieces),
                )
                for name, (shape, code, pieces) in table["tensors"].items()
            },
        )


def await_parts(path: Path, order: _Order) -> list[Part]:
    """What the other processes have written, once all have.

    Raises:
        SpmdZeroCheckpointError: one of them failed, or doesn't come to an end.
    """
    files = [_name(path, order.nonce, process) for process in range(1, order.processes)]
    end = time.monotonic() + _PATIENCE
    while not all(file.exists() for file in files):
        missing = next(file for file in files if not file.exists())
        _wait(path, order.nonce, end, f"another process has not written {missing.name}")
    return [Part.read(file) for file in files]


def await_commit(path: Path, nonce: str) -> None:
    """Returns once the first process has made the checkpoint complete.

    Raises:
        SpmdZeroCheckpointError: a process failed, or doesn't come to an end.
    """
    end = time.monotonic() + _PATIENCE
    while committed_nonce(path) != nonce:
        _wait(path, nonce, end, "the first process has not completed it")


def report_failure(path: Path, order: _Order, error: BaseException) -> None:
    """Tells the other processes that this one gave up."""
    said = json.dumps(f"process {order.process}: {error}").encode()
    write_whole(path / f"failed-{order.nonce}-{order.process:05}.json", [said])


def _name(path: Path, nonce: str, process: int) -> Path:
    return path / f"part-{nonce}-{process:05}.json"


def _wait(path: Path, nonce: str, end: float, overdue: str) -> None:
    for failed in path.glob(f"failed-{nonce}-*.json"):
        raise _given_up(path, json.loads(failed.read_bytes()))
    if time.monotonic() > end:
        raise _given_up(path, f"{overdue} within {_PATIENCE:g} s")
    time.sleep(_PAUSE)


def _given_up(path: Path, reason: str) -> SpmdZeroCheckpointError:
    return SpmdZeroCheckpointError(file=path, reason=f"can't be saved: {reason}", newest=None)
