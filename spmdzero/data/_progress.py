"""How far an epoch of a loader has come, and what it takes to read the rest of it again."""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from spmdzero.data._generators import host_generators, set_generators

logger = logging.getLogger("spmdzero")


def drawn_seed() -> int:
    """A new seed, from torch's CPU generator: `torch.manual_seed` repeats it."""
    return int(torch.empty((), dtype=torch.int64).random_())


class LoaderProgress:
    """The micro-batches of one epoch that were handed out, and those that were read ahead.

    Reading one may draw random numbers. Each that was read ahead is remembered with the states
    that the generators had before: a resumed epoch reads it again with them, and leaves the
    generators to the training as it finds them.

    Args:
        epoch: in whose order they come.
        seed: of the epoch, for worker processes.
        handed_out: micro-batches that the caller has got.
        ahead: the generators before each that was read but not handed out.

    Attributes:
        epoch, seed, handed_out: as given.
        start: `handed_out` at the beginning.
        finished: the caller was told that there are no more.
    """

    def __init__(
        self,
        *,
        epoch: int,
        seed: int = 0,
        handed_out: int = 0,
        ahead: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.epoch, self.seed = epoch, seed
        self.start = self.handed_out = handed_out
        self.finished = False
        self._ahead = deque[dict[str, Any]]()
        self._again = deque(ahead)

    @contextlib.contextmanager
    def reading(self, *, seen: bool) -> Iterator[None]:
        """Around the reading of one micro-batch.

        Args:
            seen: it was handed out before the epoch was resumed; what it draws has been drawn.
        """
        before = host_generators()
        if seen:
            yield
            set_generators(before)
        elif self._again:
            then = self._again.popleft()
            self._ahead.append(then)
            set_generators(then)
            yield
            set_generators(before)
        else:
            self._ahead.append(before)
            yield

    def drop(self) -> None:
        """The one read last is not handed out."""
        self._ahead.pop()

    def hand_out(self) -> None:
        """The caller gets the one that was read first."""
        self._ahead.popleft()
        self.handed_out += 1

    def state_dict(self, *, rows: int) -> dict[str, Any]:
        """What `load` continues from.

        Args:
            rows: samples in a micro-batch of all devices.
        """
        return {
            "epoch": self.epoch,
            "rows": rows,
            "handed_out": self.handed_out,
            "finished": self.finished,
            "seed": self.seed,
            "ahead": [*self._ahead, *self._again],
        }

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> "LoaderProgress":
        """The saved progress."""
        return cls(**{key: state[key] for key in ("epoch", "seed", "handed_out", "ahead")})


def in_micro_batches_of(
    rows: int, state: Mapping[str, Any], *, samples: int | None, length: int | None
) -> dict[str, Any]:
    """A state of `LoaderProgress` in micro-batches of `rows` samples.

    Args:
        rows: samples in a micro-batch of all devices.
        state: the saved one.
        samples, length: samples and micro-batches in an epoch; None where that is not known.
    """
    # A checkpoint of before this was noted has not finished.
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
