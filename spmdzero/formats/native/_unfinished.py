"""Which saves are under way in a folder of checkpoints, or were cut short: whose files may go.

Each has a hidden folder beside the tags, named by its nonce, which says what tag it writes or
deletes. Of another folder, whatever the names of its files, a save deletes nothing.
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
"""Seconds in which the slowest of several processes must have done its part of a save."""
_PREFIX = ".saving-"


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A save, or a deletion, of one tag.

    Attributes:
        place: its hidden folder.
        tag: what it writes or deletes.
        processes: that take part in it.
    """

    place: Path
    tag: str
    processes: int

    @property
    def nonce(self) -> str:
        """What the names of its files have in common."""
        return self.place.name.removeprefix(_PREFIX)


def place_of(folder: Path, nonce: str) -> Path:
    """The hidden folder of a save."""
    # It is beside the tags, where the save of another run doesn't remove it.
    return folder / f"{_PREFIX}{nonce}"


def note(folder: Path, nonce: str, *, tag: str, processes: int = 1) -> None:
    """Notes that files of this nonce are written into a tag's folder, or deleted from it."""
    place = place_of(folder, nonce)
    os.makedirs(place, exist_ok=True)
    write_whole(place / BEGUN, json.dumps({"tag": tag, "processes": processes}).encode())


def forget(folder: Path, nonce: str) -> None:
    """Notes that nothing is to be done any more for this nonce."""
    _remove(place_of(folder, nonce))


def unfinished(folder: Path) -> Iterator[Unfinished]:
    """What was begun and is not over; nobody else may be saving into the folder."""
    for place in sorted(folder.glob(f"{_PREFIX}*")):
        try:
            noted = json.loads((place / BEGUN).read_bytes())
            tag, processes = check_tag(str(noted["tag"])), int(noted["processes"])
        except (OSError, ValueError, KeyError, TypeError, SpmdZeroUsageError):
            _remove_without_note(place)
        else:
            yield Unfinished(place=place, tag=tag, processes=processes)


def remove_note(found: Unfinished) -> None:
    """Forgets what was cleared up, unless another process may still look, or write."""
    if found.processes == 1 or _is_old(found.place):
        _remove(found.place)


def _remove_without_note(place: Path) -> None:
    with contextlib.suppress(OSError):
        # Cut short before anything was noted, or what another process has told.
        if {f".{BEGUN}.tmp"}.issuperset(os.listdir(place)) or _is_old(place):
            _remove(place)


def _is_old(place: Path) -> bool:
    return time.time() - place.stat().st_mtime > PATIENCE


def _remove(place: Path) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(place):
            os.unlink(place / name)
        os.rmdir(place)
