"""Keeps what the TPU's compiler made of a program, for the next process that asks for the same."""

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmdzero._logging import log_once
from spmdzero.formats._files import write_whole

_folder: Path | None = None


@contextlib.contextmanager
def keeping_programs(folder: Path) -> Iterator[None]:
    """Context in which `compile_for_tpu` reads from `folder` what it has compiled before.

    A program is known by its text, its topology, the compiler's flags and libtpu's version, so one
    of a changed model is another one. Threads may share the folder, and processes too.
    """
    global _folder
    before, _folder = _folder, folder
    try:
        yield
    finally:
        _folder = before


def known(key: str) -> dict[str, Any] | None:
    """Reads what `remember` was given for `key`; None if nothing is kept."""
    if _folder is None:
        return None
    try:
        return json.loads(gzip.decompress((_folder / f"{key}.json.gz").read_bytes()))
    except (OSError, EOFError, ValueError):
        return None


def remember(key: str, made: dict[str, Any]) -> None:
    """Keeps `made` for `key`, where a folder is set; whole, or not at all."""
    if _folder is None:
        return
    try:
        _folder.mkdir(parents=True, exist_ok=True)
        # The fastest level: the text of a large program is a hundred megabytes.
        write_whole(_folder / f"{key}.json.gz", gzip.compress(json.dumps(made).encode(), 1))
    except OSError as error:
        log_once(f"programs that were compiled for a TPU are not kept: {error}")
