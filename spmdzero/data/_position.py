"""The position of a loader in its epoch, and the state needed to read the rest again."""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from spmdzero.data._seeds import host_generators, set_generators

logger = logging.getLogger("spmdzero")


class Pass:
    """A pass over the micro-batches of an epoch, or over the rest of a saved one.

    Reading a micro-batch may draw random numbers. For each one that was read ahead, the states of
    the generators before the reading are kept: a resumed pass reads it again with these states, and
    leaves the generators to the training as it found them.

    Args:
        epoch: determines the order.
        seed: of the epoch, for worker processes.
        handed_out: number of micro-batches that the caller has got.
        ahead: the generators' states before each micro-batch that was read but not handed out.

    Attributes:
        epoch, seed, handed_out: as given.
        start: `handed_out` at the beginning.
        is_open: whether it has begun, and was neither finished nor broken off.
        finished: whether the caller was told that there are no more.
        began_at: number of micro-batches that the engine had trained when it began, else None.
        before: while it is open, the pass that counted before it.
    """

    def __init__(
        self, *, epoch: int, seed: int = 0, handed_out: int = 0, ahead: Sequence[Any] = ()
    ) -> None:
        self.epoch, self.seed = epoch, seed
        self.start = self.handed_out = handed_out
        self.is_open = self.finished = False
        self.began_at: int | None = None
        self.before: Pass | None = None
        self._ahead = deque[dict[str, Any]]()
        self._again = deque(ahead)

    @contextlib.contextmanager
    def reading(self, *, seen: bool) -> Iterator[None]:
        """Context around the reading of one micro-batch.

        Args:
            seen: whether it was handed out before the epoch was resumed, so that its draws have
                been made already.
        """
        before = host_generators()
        then = before if seen or not self._again else self._again.popleft()
        if not seen:
            self._ahead.append(then)
        if then is not before:
            set_generators(then)
        yield
        if seen or then is not before:
            set_generators(before)

    def drop(self) -> None:
        """Drops the micro-batch that was read last."""
        self._ahead.pop()

    def hand_out(self) -> None:
        """Counts the micro-batch that was read first as handed out."""
        self._ahead.popleft()
        self.handed_out += 1

    def state_dict(self, *, rows: int) -> dict[str, Any]:
        """The state for `load`, in micro-batches of `rows` rows over all devices."""
        return {
            "epoch": self.epoch,
            "rows": rows,
            "handed_out": self.handed_out,
            "finished": self.finished,
            "seed": self.seed,
            "ahead": [*self._ahead, *self._again],
        }

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> "Pass":
        """The rest of the saved pass, which hasn't begun."""
        return cls(**{key: state[key] for key in ("epoch", "seed", "handed_out", "ahead")})


class LoaderPosition:
    """Keeps the pass over a loader that counts: the one from which training took last.

    A pass without any training on it was only a look at the data. If it is broken off, the position
    returns to what it was before, and a resumed epoch still continues where it was saved. A pass
    that is broken off after training keeps its position: a run that stops after some steps, and
    then saves, continues with the rest of the epoch.

    Args:
        rows: samples in a micro-batch of all devices.
        steps: returns how many micro-batches the engine has trained so far.
    """

    def __init__(self, *, rows: int, steps: Callable[[], int]) -> None:
        self._rows, self._steps = rows, steps
        self._counting: Pass | None = None

    @contextlib.contextmanager
    def iteration(self, epoch: int) -> Iterator[Pass]:
        """Context of one pass: the rest of a resumed epoch, if that is `epoch`, else all of it."""
        if self._counting is not None and self._counting.is_open:
            # An interrupted cell of a notebook leaves its loop open.
            self._forget_if_unused(self._counting)
        before = self._counting
        if before is not None and before.began_at is None and before.epoch == epoch:
            current = Pass.load(before.state_dict(rows=self._rows))
            generators = host_generators()
        else:
            # The seed comes from torch's CPU generator, so that `torch.manual_seed` repeats it.
            seed = int(torch.empty((), dtype=torch.int64).random_())
            current, generators = Pass(epoch=epoch, seed=seed), {}
        current.is_open, current.began_at, current.before = True, self._steps(), before
        self._counting = current
        try:
            yield current
            current.finished = True
        finally:
            if not current.finished and self._forget_if_unused(current):
                # A run without the interruption reads this later.
                set_generators(generators)
            current.is_open, current.before = False, None

    def hand_out(self, current: Pass) -> None:
        """Counts this pass's first read micro-batch as handed out."""
        current.hand_out()
        self._counting = current

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict`, in micro-batches of the same number of rows."""
        within = state["handed_out"] and not state["finished"]
        self._counting = Pass.load(state) if within else None

    def state_dict(self, epoch: int) -> dict[str, Any]:
        """The state for `resume`.

        Args:
            epoch: that of the next pass.
        """
        found = self._counting
        if found is None or not (found.is_open or found.epoch == epoch):
            found = Pass(epoch=epoch)
        return found.state_dict(rows=self._rows)

    def _forget_if_unused(self, current: Pass) -> bool:
        unused = self._counting is current and self._steps() == current.began_at
        if unused:
            self._counting = current.before
        return unused


def in_micro_batches_of(
    rows: int, state: Mapping[str, Any], *, samples: int | None, length: int | None
) -> dict[str, Any]:
    """Converts a state of a `LoaderPosition` to micro-batches of `rows` samples.

    Args:
        rows: samples in a micro-batch of all devices.
        state: the saved state.
        samples, length: samples and micro-batches in an epoch; None where they are not known.
    """
    # Older checkpoints lack this entry; their pass has not finished.
    state = {"finished": False, **state}
    if state["rows"] == rows:
        return state
    seen = state["handed_out"] * state["rows"]
    # The last micro-batch may have been a short one.
    at_end = samples is not None and 0 <= seen - samples < state["rows"]
    if seen % rows and not at_end:
        logger.warning(
            "the checkpoint was saved after %d samples of an epoch, which is no whole number "
            "of micro-batches of %d: %d samples are seen again", seen, rows, seen % rows
        )  # fmt: skip
    handed_out = length if at_end and length is not None else seen // rows
    return {**state, "rows": rows, "handed_out": handed_out, "ahead": []}
