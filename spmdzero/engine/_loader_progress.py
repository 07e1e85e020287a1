"""How far an epoch of a loader has come, and what it takes to read the rest of it again."""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spmdzero.engine._generators import host_generators, set_generators

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
        seed: of the epoch, for worker processes.
        handed_out: micro-batches that the caller has got.
        ahead: the generators before each that was read but not handed out.

    Attributes:
        seed, handed_out: as given.
    """

    def __init__(
        self, *, seed: int = 0, handed_out: int = 0, ahead: list[dict[str, Any]] | None = None
    ) -> None:
        self.seed, self.handed_out = seed, handed_out
        self._ahead = deque[dict[str, Any]]()
        self._again = deque(ahead or [])

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

    def state_dict(self, *, epoch: int, rows: int) -> dict[str, Any]:
        """What `load` continues from.

        Args:
            epoch: the sampler's.
            rows: samples in a micro-batch of all devices.
        """
        return {
            "epoch": epoch,
            "rows": rows,
            "handed_out": self.handed_out,
            "seed": self.seed,
            "ahead": [*self._ahead, *self._again],
        }

    @classmethod
    def load(cls, state: Mapping[str, Any], *, rows: int) -> "LoaderProgress":
        """The progress in micro-batches of `rows` samples."""
        if state["rows"] == rows:
            return cls(seed=state["seed"], handed_out=state["handed_out"], ahead=state["ahead"])
        seen = state["handed_out"] * state["rows"]
        if seen % rows:
            logger.warning(
                "the checkpoint was saved after %d samples of an epoch, which is no whole number "
                "of micro-batches of %d: %d samples are seen again", seen, rows, seen % rows
            )  # fmt: skip
        return cls(seed=state["seed"], handed_out=seen // rows)
