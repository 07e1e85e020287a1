"""Where a loader stands among its iterations, and where a resumed one goes on."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spmdzero.data._generators import host_generators, set_generators
from spmdzero.data._progress import LoaderProgress, drawn_seed


@dataclasses.dataclass(kw_only=True, eq=False)
class Iteration:
    """One pass over the loader, and the position before it.

    Attributes:
        progress: how far it has come.
        began_at: micro-batches that the engine had trained when it began.
        resumed: the saved state that it goes on with, None if it began an epoch.
        before: the iteration that counted before it.
        is_open: it was neither finished nor broken off.
    """

    progress: LoaderProgress
    began_at: int
    resumed: Mapping[str, Any] | None
    before: "Iteration | None"
    is_open: bool = True


class LoaderPosition:
    """Which iteration of a loader counts: the one that training has last taken from.

    An iteration from which nothing was trained was a look at the data. When it is broken off, the
    position is what it was before it, and a resumed epoch still goes on where it was saved. One
    that is broken off after training keeps the position: a run that stops after so many steps,
    and saves then, goes on with the rest of the epoch.

    Args:
        rows: samples in a micro-batch of all devices.
        steps: how many micro-batches the engine has trained so far.
    """

    def __init__(self, *, rows: int, steps: Callable[[], int]) -> None:
        self._rows, self._steps = rows, steps
        self._latest: Iteration | None = None
        self._resumed: Mapping[str, Any] | None = None

    @contextlib.contextmanager
    def iteration(self, epoch: int) -> Iterator[Iteration]:
        """Around one pass: over the rest of a resumed epoch, if that is `epoch`, else all of it."""
        if self._latest is not None and self._latest.is_open:
            # An interrupted cell of a notebook leaves its loop open.
            self._forget_if_unused(self._latest)
        resumed = self._resumed_in(epoch)
        generators = {} if resumed is None else host_generators()
        current = Iteration(
            progress=LoaderProgress(epoch=epoch, seed=drawn_seed())
            if resumed is None
            else LoaderProgress.load(resumed),
            began_at=self._steps(),
            resumed=resumed,
            before=self._latest,
        )
        self._latest, self._resumed = current, None
        try:
            yield current
            current.progress.finished = True
        finally:
            if not current.progress.finished and self._forget_if_unused(current):
                # The run that was not interrupted has read this later.
                set_generators(generators)
            current.is_open, current.before = False, None

    def hand_out(self, current: Iteration) -> None:
        """The caller gets the micro-batch of this iteration that was read first."""
        current.progress.hand_out()
        if self._latest is not current:
            self._latest, self._resumed = current, None

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` has given, in micro-batches of the same rows."""
        self._latest = None
        self._resumed = state if state["handed_out"] and not state["finished"] else None

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """What `resume` takes.

        Args:
            epoch: in whose order the next iteration is.
        """
        resumed, latest = self._resumed_in(epoch), self._latest
        if resumed is not None:
            return dict(resumed)
        if latest is not None and (latest.is_open or latest.progress.epoch == epoch):
            return latest.progress.state_dict(rows=self._rows)
        return LoaderProgress(epoch=epoch).state_dict(rows=self._rows)

    def _resumed_in(self, epoch: int) -> Mapping[str, Any] | None:
        same = self._resumed is not None and self._resumed["epoch"] == epoch
        return self._resumed if same else None

    def _forget_if_unused(self, current: Iteration) -> bool:
        unused = self._latest is current and self._steps() == current.began_at
        if unused:
            self._latest, self._resumed = current.before, current.resumed
        return unused
