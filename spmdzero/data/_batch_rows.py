"""Tells which inputs of a forward are batches, by their numbers of rows."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import TypeAlias

from spmdzero.backend import local_replicas, runtime
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import MeshSpec

logger = logging.getLogger("spmdzero")
# Number of rows in a whole micro-batch, and the paths of all inputs.
_Kind: TypeAlias = tuple[int, tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """An input that may be a batch.

    Attributes:
        path: its place among the inputs.
        shape: of the tensor.
        count: its size in the batch dim on this host.
    """

    path: str
    shape: tuple[int, ...]
    count: int

    def __str__(self) -> str:
        return f"input {self.path!r} of shape {list(self.shape)} has {self.count} rows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batches:
    """The inputs of one forward that are batches, and how the devices take them.

    Attributes:
        paths: their places among the inputs.
        joined: number of the loader's batches that stand in each of them, one after the other.
        shared: whether each device takes its part of the rows; else each takes all of them.
    """

    paths: frozenset[str]
    joined: int = 1
    shared: bool = True


class BatchRows:
    """Tells batches from other inputs.

    In training a batch has all rows of a micro-batch, or fewer, as the last one of an epoch may. A
    short batch is recognised by the inputs that were batches in the first whole micro-batch with
    the same inputs. A loader that yields the rows of one device instead of all never has a whole
    batch, so that its rows are no short batch. In evaluation a batch may have any number of rows;
    if the devices of a lone host can't share it equally, each takes it whole.

    Each device trains on its share of the rows, and loss and gradient are the mean over devices
    of the mean over their rows, as over DeepSpeed's ranks whose loaders end with a short batch.

    With `any_number` a batch may also have more rows than a micro-batch. Twice as many count as two
    batches that the caller has joined, such as chosen and rejected answers before a reward model.
    A device gets its part of each, so that a model may pair them, like a rank that had joined its
    own batches. This holds for all later batches with the same inputs.

    Args:
        micro_batch: rows that each replica works on.
        mesh: the devices; unless its axis ``tensor`` has several, each is a replica.

    Attributes:
        micro_batch: as given; may be changed.
        of_process: whether the config counts the rows of this process, as a client's does, and not
            those of a device.
        any_number: whether a batch may have any number of rows, the first one too. If the devices
            can't share it equally, each takes it whole.
        announced: number of rows of a short micro-batch that the engine's own loader has just
            yielded, None if it was a whole one.
    """

    def __init__(self, micro_batch: int, mesh: MeshSpec) -> None:
        self.micro_batch = micro_batch
        self._local = local_replicas(mesh)
        self._noun = "replicas" if mesh.sharing else "devices"
        self.of_process = False
        self.any_number = False
        self.announced: int | None = None
        self._whole: dict[_Kind, frozenset[str]] = {}
        # The number of batches that are joined.
        self._joined: dict[_Kind, int] = {}
        self._said: set[int] = set()

    @property
    def whole(self) -> int:
        """Number of this host's rows in a whole micro-batch."""
        return self.micro_batch * self._local

    @property
    def named(self) -> str:
        """Text for a message: the factors of a whole micro-batch's rows, as the user wrote them."""
        local = f"{self._local} {self._noun}"
        if self.of_process:
            return (
                f"train_micro_batch_size_per_gpu, which counts the rows of a process here, "
                f"{self.micro_batch} on each of its {local}"
            )
        return (
            f"train_micro_batch_size_per_gpu ({self.micro_batch}) x {self._local} local "
            f"{self._noun}"
        )

    def batches(self, inputs: Sequence[Rows], *, training: bool) -> Batches:
        """The inputs that are batches.

        Raises:
            SpmdZeroUsageError: in training, no input has the rows of a whole micro-batch or of a
                short one; or devices that have to share the rows of the first one can't.
        """
        if not inputs:
            return Batches(paths=frozenset())
        kind = self.whole, tuple(item.path for item in inputs)
        paths = self._paths(kind, inputs, training=training)
        first = next(item for item in inputs if item.path in paths)
        joined = self._joined_in(kind, first.count, training=training) if self.any_number else 1
        shared = self._shares(first, joined, training=training)
        if not training and not shared:
            self._say_whole(first.count)
        if training and first.count not in (self.announced, joined * self.whole):
            self._say(first.count, joined, short=kind in self._whole or joined > 1)
        return Batches(paths=paths, joined=joined or 1, shared=shared)

    def _paths(self, kind: _Kind, inputs: Sequence[Rows], *, training: bool) -> frozenset[str]:
        whole = _with(self.whole, inputs)
        if whole and training:
            self._whole.setdefault(kind, whole)
        known = [item for item in inputs if item.path in self._whole.get(kind, ())]
        if not training:
            candidates = known or inputs
            return whole or _with(candidates[0].count, candidates)
        self._refuse_mixed(known)
        if whole:
            return whole
        first = known[0] if known else inputs[0]
        is_short = 0 < first.count < self.whole and bool(known)
        if not (is_short or self.any_number or first.count == self.announced):
            raise self._wrong(first)
        return frozenset(item.path for item in known) or _with(first.count, inputs)

    def _joined_in(self, kind: _Kind, rows: int, *, training: bool) -> int:
        """Number of batches that are joined in one of `rows` rows; 0 where it can't be told."""
        joined, rest = divmod(rows, self.whole)
        if training and joined and not rest:
            self._joined.setdefault(kind, joined)
        if kind in self._joined:
            return self._joined[kind]
        if not joined or (rest and not training):
            return 1
        return 0 if rest else joined

    def _shares(self, item: Rows, joined: int, *, training: bool) -> bool:
        """Whether the devices share the rows.

        Raises:
            SpmdZeroUsageError: they can't, and taking all rows on each device is not possible.
        """
        devices = self._local
        if joined and item.count % (joined * devices) == 0:
            return True
        if (self.any_number or not training) and runtime.process_count() == 1:
            return False
        up = -(-item.count // devices) * devices
        if not training:
            raise SpmdZeroUsageError(
                f"{item}, which {devices} local {self._noun} can't share equally, and on several "
                f"hosts they have to. Pad it to {up} rows, and leave these rows out of what the "
                f"engine returns: output[:{item.count}]"
            )
        raise SpmdZeroUsageError(
            f"{item}, which {devices} local {self._noun} can't share equally. Leave the last short "
            f"batch of an epoch out with DataLoader(drop_last=True), pad it to {up} rows, or "
            "take the loader of initialize(training_data=...), which repeats rows as "
            "DistributedSampler does"
        )

    def _say_whole(self, rows: int) -> None:
        if 0 not in self._said:
            self._said.add(0)
            logger.info(
                "an evaluation of %d rows, which %d %s can't share equally: each computes all of "
                "them, which is exact and as slow as one. A multiple of %d is shared",
                rows, self._local, self._noun, self._local,
            )  # fmt: skip

    def _say(self, rows: int, joined: int, *, short: bool) -> None:
        if rows in self._said:
            return
        self._said.add(rows)
        devices = self._local
        if not joined:
            logger.warning(
                "a forward of %d rows, where a batch of the loader has %d: two batches that were "
                "joined have %d. As nobody can say how these belong together, each of %d devices "
                "trains on all of them, which is right and as slow as one device. Let the rows of "
                "a forward be a multiple of the loader's (per_device_train_batch_size)",
                rows, self.whole, 2 * self.whole, devices,
            )  # fmt: skip
        elif short and rows < joined * self.whole:
            logger.warning(
                "a micro-batch of %d rows instead of %d: each of %d devices trains on %d, in a "
                "program of its own. DataLoader(drop_last=True) leaves the last short batch of "
                "an epoch out",
                rows, joined * self.whole, devices,
                rows if rows % (joined * devices) else rows // devices,
            )  # fmt: skip

    def _refuse_mixed(self, batches: Sequence[Rows]) -> None:
        odd = next((item for item in batches if item.count != batches[0].count), None)
        if odd is not None:
            raise SpmdZeroUsageError(
                f"{batches[0]}, and {odd}; both were batches of {self.whole} rows before. If one "
                "of them is no batch but goes to every device whole, hand it over as "
                "spmdzero.replicated(tensor) each time"
            )

    def _wrong(self, item: Rows) -> SpmdZeroUsageError:
        message = (
            f"{item}, a micro-batch has {self.whole} = {self.named}. Hand the engine all rows of "
            f"this host's devices at once, as of a DataLoader(batch_size={self.whole})"
        )
        if 0 < item.count < self.whole:
            message += (
                "; a shorter micro-batch, such as the last one of an epoch, trains after the "
                "first whole one"
            )
        return SpmdZeroUsageError(message)


def _with(count: int, inputs: Sequence[Rows]) -> frozenset[str]:
    return frozenset(item.path for item in inputs if item.count == count)
