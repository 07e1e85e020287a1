"""Counts the arithmetic of the forwards that engines run."""

import contextlib
import gc
import io
from collections.abc import Iterator, Mapping
from typing import Any

from spmdzero.backend import Work
from spmdzero.backend.pure import GeneratorWatch, ModuleWatch
from spmdzero.engine._programs import Compiled, ProgramLog
from spmdzero.state._training import Training


class WorkCount:
    """The arithmetic of all engines' forwards, and of their backwards, since it was last taken."""

    def __init__(self) -> None:
        self._work = Work()

    def add(self, work: Work) -> None:
        """Adds that of one forward."""
        self._work = self._work + work

    def take(self) -> Work:
        """Returns what was added, and begins anew."""
        work, self._work = self._work, Work()
        return work


# Of contexts that count, one inside another.
_counts: list[WorkCount] = []


@contextlib.contextmanager
def counting_work() -> Iterator[WorkCount]:
    """Context in which each forward of an engine is traced once more, to count its arithmetic."""
    count = WorkCount()
    _counts.append(count)
    try:
        yield count
    finally:
        _counts.remove(count)


def count_work(
    training: Training, programs: ProgramLog, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Counts a forward that is about to run, if anyone wants it; it changes nothing.

    Args:
        training: the training of the engine.
        programs: counts the compilations and reads of the trace apart from the script's.
        args, kwargs: the forward's placed inputs.
    """
    if not _counts:
        return
    before = Compiled.so_far()
    try:
        with (
            GeneratorWatch(),
            ModuleWatch(training.module, {}),
            programs.own_reads(),
            # What a model prints is printed by the forward that runs.
            contextlib.redirect_stdout(io.StringIO()),
        ):
            work = training.forward.count(args, kwargs)
    except Exception as error:
        # What can't be traced alone is said in the figure's place.
        said = str(error).strip().splitlines() or [type(error).__name__]
        work = Work(unknown=(f"a forward that was traced to count it ended in: {said[0]}",))
    finally:
        # What the trace has recorded would be computed where the forward reads a value.
        gc.collect()
        programs.not_the_scripts(Compiled.so_far() - before)
    for count in _counts:
        count.add(work)
