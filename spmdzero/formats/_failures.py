"""How the processes of one save learn that another of them failed: by files beside the tags."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from spmdzero.errors import SpmdZeroCheckpointError, SpmdZeroError
from spmdzero.formats._files import write_whole
from spmdzero.formats._folder import newest_complete, report_of

PREFIX = "can't be saved: "


class Place(Protocol):
    """What of a save's order says who takes part in it, and where."""

    @property
    def folder(self) -> Path: ...
    @property
    def tag(self) -> str: ...
    @property
    def nonce(self) -> str: ...
    @property
    def process(self) -> int: ...
    @property
    def processes(self) -> int: ...


@contextlib.contextmanager
def shared_failure(order: Place) -> Iterator[None]:
    """What is raised inside is raised by the other processes too, where they `raise_shared` next.

    Everything that one process does for a save alone belongs inside: the others would wait for it.
    """
    try:
        yield
    except BaseException as error:
        # A process that fails because another did has nothing to add.
        if order.processes > 1 and not _reports(order):
            # Who can't write into the folder can't tell; that is one of the reasons to fail.
            with contextlib.suppress(OSError):
                _report(order, error)
        raise


def raise_shared(order: Place) -> None:
    """Raises SpmdZeroCheckpointError with the reason of a process that failed, if one did."""
    for report in _reports(order):
        raise SpmdZeroCheckpointError(**json.loads(report.read_bytes()))


def _reports(order: Place) -> list[Path]:
    files = [
        report_of(order.folder, nonce=order.nonce, process=process)
        for process in range(order.processes)
    ]
    return [file for file in files if file.exists()]


def _report(order: Place, error: BaseException) -> None:
    said = {
        "file": str(order.folder / order.tag),
        "reason": str(error),
        "newest": newest_complete(order.folder),
        "fix": "",
    }
    if isinstance(error, SpmdZeroCheckpointError):
        said = {key: getattr(error, key) for key in said}
    elif not isinstance(error, SpmdZeroError):
        said["reason"] = f"{type(error).__name__}: {error}"
    reason = str(said["reason"]).removeprefix(PREFIX)
    said["reason"] = f"{PREFIX}process {order.process}: {reason}"
    os.makedirs(order.folder, exist_ok=True)
    file = report_of(order.folder, nonce=order.nonce, process=order.process)
    write_whole(file, [json.dumps(said).encode()])
