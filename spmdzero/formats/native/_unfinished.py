"""The saves in a folder of checkpoints that are running or were cut short, whose files may go.

Each has a hidden folder beside the tags, named by its nonce, with the tag that it writes or
deletes. A save deletes nothing in any other folder, whatever its files are called.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats._files import write_whole
from spmdzero.formats._latest import check_tag

BEGUN = "begun"
PATIENCE = 1800.0
"""Seconds in which the slowest of several processes must do its part of a save."""
_PREFIX = ".saving-"


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A save, or a deletion, of one tag that has not ended.

    Attributes:
        place: its hidden folder.
        tag: the tag that it writes or deletes.
        processes: number of processes that take part.
    """

    place: Path
    tag: str
    processes: int

    @property
    def nonce(self) -> str:
        """The common part of its files' names."""
        return self.place.name.removeprefix(_PREFIX)


def place_of(folder: Path, nonce: str) -> Path:
    """The hidden folder of a save."""
    # It is beside the tags, where the save of another run doesn't remove it.
    return folder / f"{_PREFIX}{nonce}"


def note(folder: Path, nonce: str, *, tag: str, processes: int = 1) -> None:
    """Records that files of this nonce are written into a tag's folder, or deleted from it."""
    place = place_of(folder, nonce)
    os.makedirs(place, exist_ok=True)
    write_whole(place / BEGUN, json.dumps({"tag": tag, "processes": processes}).encode())


def forget(folder: Path, nonce: str) -> None:
    """Records that nothing remains to be done for this nonce."""
    _remove(place_of(folder, nonce))


def unfinished(folder: Path) -> Iterator[Unfinished]:
    """The saves that began and have not ended; no other process may be saving into the folder."""
    for place in sorted(folder.glob(f"{_PREFIX}*")):
        try:
            noted = json.loads((place / BEGUN).read_bytes())
            tag, processes = check_tag(str(noted["tag"])), int(noted["processes"])
        except (OSError, ValueError, KeyError, TypeError, SpmdZeroUsageError):
            _remove_without_note(place)
        else:
            yield Unfinished(place=place, tag=tag, processes=processes)


def remove_note(found: Unfinished) -> None:
    """Forgets a save that was cleaned up, unless another process may still look, or write."""
    if found.processes == 1 or _is_old(found.place):
        _remove(found.place)


def _remove_without_note(place: Path) -> None:
    with contextlib.suppress(OSError):
        # It was cut short before anything was recorded, except messages of another process.
        if {f".{BEGUN}.tmp"}.issuperset(os.listdir(place)) or _is_old(place):
            _remove(place)


def _is_old(place: Path) -> bool:
    return time.time() - place.stat().st_mtime > PATIENCE


def _remove(place: Path) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(place):
            os.unlink(place / name)
        os.rmdir(place)
