"""How the processes of several hosts make one checkpoint: by files in the folder they share.

No collective: the saving thread would meet the training's collectives in another order on each
host.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats._failures import PREFIX, Place, raise_shared
from spmdzero.formats._files import write_whole
from spmdzero.formats._folder import PATIENCE
from spmdzero.formats._manifest import FileEntry, TensorEntry, committed_nonce
from spmdzero.formats._tensor_file import CODES, DTYPES, Piece

_PAUSE = 0.05


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

    def write(self, order: Place) -> None:
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
        write_whole(_part(order, order.process), [json.dumps(table).encode()])

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


def begin(order: Place) -> None:
    """The first process tells the others that the folder is theirs to write into."""
    write_whole(_begun(order), [b"{}"])


def await_beginning(order: Place) -> None:
    """Returns once the first process has the folder for this save.

    Before that it may belong to another run, whose files this one's must not come between.

    Raises:
        SpmdZeroCheckpointError: a process failed, or the first one doesn't begin.
    """
    end = time.monotonic() + PATIENCE
    while not _begun(order).exists():
        _wait(order, end, "the first process has not begun it")


def await_parts(order: Place) -> list[Part]:
    """What the other processes have written, once all have.

    Raises:
        SpmdZeroCheckpointError: one of them failed, or doesn't come to an end.
    """
    files = [_part(order, process) for process in range(1, order.processes)]
    end = time.monotonic() + PATIENCE
    while not all(file.exists() for file in files):
        missing = next(file for file in files if not file.exists())
        _wait(order, end, f"another process has not written {missing.name}")
    return [Part.read(file) for file in files]


def await_end(order: Place) -> None:
    """Returns once the first process is through: it takes the parts away when all is done.

    Raises:
        SpmdZeroCheckpointError: a process failed, or doesn't come to an end.
    """
    end = time.monotonic() + PATIENCE
    while _part(order, order.process).exists():
        _wait(order, end, "the first process has not completed it")
    if committed_nonce(order.folder / order.tag) != order.nonce:
        raise _given_up(order, "another save has taken its place")


def _begun(order: Place) -> Path:
    return order.folder / order.tag / f"begun-{order.nonce}.json"


def _part(order: Place, process: int) -> Path:
    return order.folder / order.tag / f"part-{order.nonce}-{process:05}.json"


def _wait(order: Place, end: float, overdue: str) -> None:
    raise_shared(order)
    if time.monotonic() > end:
        raise _given_up(order, f"{overdue} within {PATIENCE:g} s")
    time.sleep(_PAUSE)


def _given_up(order: Place, reason: str) -> SpmdZeroCheckpointError:
    return SpmdZeroCheckpointError(
        file=order.folder / order.tag, reason=f"{PREFIX}{reason}", newest=None
    )
