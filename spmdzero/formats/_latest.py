"""Names of checkpoints, and the files that name the one to load."""

import os
from pathlib import Path

from spmdzero.errors import SpmdZeroCheckpointError, SpmdZeroUsageError
from spmdzero.formats._files import settle, write_whole

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
# Most file systems allow 255 bytes for a name; prefixes and suffixes are added to this one.
_LONGEST = 200


def check_tag(tag: str) -> str:
    """Checks that `tag` can name a checkpoint, and returns it.

    Raises:
        SpmdZeroUsageError: it can't name a folder, or is read as another name.
    """
    if wrong := _wrong_with(tag):
        raise SpmdZeroUsageError(
            f"a checkpoint's tag is the name of a folder, got {tag!r}: {wrong}. Write a name such "
            "as 'global_step10' or 'best'"
        )
    return tag


def _wrong_with(tag: str) -> str:
    if not tag:
        return "it is empty"
    if "/" in tag or os.sep in tag:
        return "it has slashes, and would be somewhere else"
    if tag.startswith("."):
        return "names that begin with a dot are for the folder's own files"
    if tag != tag.strip():
        return "it has blanks at its ends, which the file latest doesn't keep"
    if not tag.isprintable():
        return "it has characters that can't be printed, or written to a file"
    if tag in (LATEST, LATEST_UNIVERSAL):
        return "it is the name of the file that says which checkpoint is the newest"
    if len(os.fsencode(tag)) > _LONGEST:
        return f"it is longer than {_LONGEST} bytes"
    return ""


def read_latest(folder: Path, name: str = LATEST) -> str | None:
    """The tag in `latest`, or in another file like it; None without such a file.

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
    """Writes `tag` into `latest`, or into another file like it."""
    write_whole(folder / name, tag.encode())
    settle(folder)
