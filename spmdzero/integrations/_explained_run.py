"""Explains the first step of a script under `spmdzero run --explain`, in whatever process it is.

Launchers start the process that trains, so that a folder whose name is in the environment says what
is asked, and takes the answer.
"""

import atexit
import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spmdzero.errors import SpmdZeroError, SpmdZeroUsageError
from spmdzero.explain import Explanation, FirstStep, Topology
from spmdzero.integrations._children import EXPLAINED

_ASKED, _ANSWERED, _FAILED = "slice", "explanation", "failure"
_lasting = contextlib.ExitStack()


@contextlib.contextmanager
def explaining(topology: Topology) -> Iterator[list[Explanation]]:
    """Context in which a script runs that is explained; yields a list that gets the explanation.

    Raises:
        SpmdZeroUsageError: the script has ended before a step of an engine, or the step can't be
            explained.
    """
    answers: list[Explanation] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / _ASKED).write_text(topology.name)
        os.environ[EXPLAINED] = name
        begin()
        try:
            yield answers
        except SystemExit as ended:
            # A step that was explained ends its script, and a launcher has a status of its own.
            if ended.code and not _is_told(folder):
                raise
        if (folder / _FAILED).exists():
            raise SpmdZeroUsageError((folder / _FAILED).read_text())
        if not (folder / _ANSWERED).exists():
            raise SpmdZeroUsageError(
                "the script ended before a step of an engine, and --explain tells of the first: of "
                "one that trains with a DeepSpeed config"
            )
        answers.append(Explanation.from_json((folder / _ANSWERED).read_text()))


def _is_told(folder: Path) -> bool:
    return any((folder / name).exists() for name in (_ANSWERED, _FAILED))


def begin() -> None:
    """Explains the first step of this process's engines in their training's place, if it is asked.

    Nothing is computed from now on.
    """
    folder = Path(os.environ.get(EXPLAINED, ""))
    if EXPLAINED in os.environ and (folder / _ASKED).exists():
        # At the interpreter's end names of modules would be gone.
        atexit.register(_lasting.close)
        asked = Topology.parse((folder / _ASKED).read_text())
        _lasting.enter_context(FirstStep(asked, ended=functools.partial(_tell, folder)).watched())


def _tell(folder: Path, step: FirstStep) -> None:
    """Writes the explanation, and ends the script.

    Raises:
        SystemExit: always.
    """
    try:
        (folder / _ANSWERED).write_text(step.explanation().to_json())
    except SpmdZeroError as error:
        (folder / _FAILED).write_text(str(error))
    raise SystemExit(0)
