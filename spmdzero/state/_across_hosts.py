"""Decisions that hosts make together, as otherwise a host would wait, or act differently."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from spmdzero.backend import runtime
from spmdzero.backend.hosts.processes import gather_objects
from spmdzero.errors import SpmdZeroCheckpointError, UsageAssertionError

_Value = TypeVar("_Value")
logger = logging.getLogger("spmdzero")


@contextlib.contextmanager
def together(file: Path, *, doing: str) -> Iterator[None]:
    """Makes every process raise if one raises inside the context; all processes must enter it.

    Args:
        file: the file in the error of the other processes.
        doing: the participle in their message, such as ``"saved"``.

    Raises:
        SpmdZeroCheckpointError: another process raised; it has that process's message.
    """
    try:
        yield
    except Exception as error:
        everyones(str(error) or type(error).__name__)
        raise
    for process, said in enumerate(everyones("")):
        if said:
            raise SpmdZeroCheckpointError(
                file=file, reason=f"can't be {doing}: process {process}: {said}"
            )


def everyones(value: _Value) -> list[_Value]:
    """The values with which all processes call this, in their order; in main threads only."""
    return [value] if runtime.process_count() == 1 else gather_objects(value)


def require_one_tag(folder: Path, tags: list[str | None]) -> None:
    """Returns if all processes are about to load the same tag, or none.

    Otherwise some would train from a different state, or wait for processes that found nothing to
    load. None is the tag of a process that finds no file `latest`.

    Raises:
        SpmdZeroCheckpointError: the tags differ.
    """
    if len(set(tags)) > 1:
        raise SpmdZeroCheckpointError(
            file=folder,
            reason=f"the processes would load the tags {tags}, None where there is no latest",
            fix="Name the same tag in every process, in a folder that all of them see",
        )


def agreed_tag(tags: list[str], *, mine: str, validation: str) -> str:
    """The first process's tag, which all use; a process with a different tag logs a warning.

    Raises:
        UsageAssertionError: in every process, if tags differ and `validation` is ``"FAIL"``.
    """
    if validation == "FAIL" and len(set(tags)) > 1:
        raise UsageAssertionError(
            f'the processes save the tags {tags}, and "tag_validation" is "FAIL": name the same '
            "tag in every process"
        )
    if validation == "WARN" and mine != tags[0]:
        logger.warning(
            "this process saves the tag %r, the first one %r, which is used", mine, tags[0]
        )
    return tags[0]
