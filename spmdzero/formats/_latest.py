"""The names of checkpoints, and the files that name the one to load."""

import os
from pathlib import Path

from spmdzero.errors import SpmdZeroCheckpointError, SpmdZeroUsageError
from spmdzero.formats._files import settle, write_whole

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"


def check_tag(tag: str) -> str:
    """Returns `tag`.

    Raises:
        SpmdZeroUsageError: it is no name of a folder.
    """
    if not tag or tag.startswith(".") or "/" in tag or os.sep in tag or "\0" in tag:
        raise SpmdZeroUsageError(
            f"a checkpoint's tag is the name of a folder, got {tag!r}: leave out slashes and a "
            "leading dot"
        )
    return tag


def read_latest(folder: Path, name: str = LATEST) -> str | None:
    """The tag that `latest`, or another file like it, names; None without such a file.

    Raises:
        SpmdZeroCheckpointError: the file can't be read, or holds no tag.
    """
    path = folder / name
    try:
        return check_tag(path.read_text().strip())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, SpmdZeroUsageError) as error:
        raise SpmdZeroCheckpointError(file=path, reason=f"names no tag: {error}") from error


def write_latest(folder: Path, tag: str, name: str = LATEST) -> None:
    """Makes `latest`, or another file like it, name `tag`."""
    write_whole(folder / name, tag.encode())
    settle(folder)
