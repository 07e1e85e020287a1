"""Which inputs of a forward are batches, by how many rows they have."""

import dataclasses
import logging
from collections.abc import Sequence

from spmdzero.backend import runtime
from spmdzero.errors import SpmdZeroUsageError

logger = logging.getLogger("spmdzero")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """An input that may be a batch.

    Attributes:
        path: where it is among the inputs.
        shape: of the tensor.
        count: its size in the batch dim on this host.
    """

    path: str
    shape: tuple[int, ...]
    count: int

    def __str__(self) -> str:
        return f"input {self.path!r} of shape {list(self.shape)} has {self.count} rows"


class BatchRows:
    """Tells batches from other inputs.

    In training a batch has all rows of a micro-batch, or fewer, as the last one of an epoch may:
    then the inputs are batches that were in the first whole micro-batch with the same inputs. A
    loader that hands out rows for one device instead of all never had a whole one, so its rows
    are no short batch. In evaluation a batch may have any number of rows.

    Each device trains on its share of the rows, and loss and gradient are the mean over devices
    of the mean over their rows, as over DeepSpeed's ranks whose loaders end with a short batch.

    Args:
        micro_batch: rows that each device works on.

    Attributes:
        micro_batch: as given; may be changed.
        of_process: whether the config counts the rows of this process, as a client's does, rather
            than those of a device.
        any_number: whether every short batch is one, the first too, and those whose rows the
            devices can't share equally, which each device then has whole.
        announced: the rows of a short micro-batch that the engine's own loader has just handed
            out, None if it was a whole one.
    """

    def __init__(self, micro_batch: int) -> None:
        self.micro_batch = micro_batch
        self.of_process = False
        self.any_number = False
        self.announced: int | None = None
        # The keys are the number of rows and the paths of all inputs.
        self._whole: dict[tuple[int, tuple[str, ...]], frozenset[str]] = {}
        self._said: set[int] = set()

    @property
    def whole(self) -> int:
        """Rows of this host in a whole micro-batch."""
        return self.micro_batch * runtime.local_device_count()

    @property
    def named(self) -> str:
        """Where the rows of a whole micro-batch come from, as the user wrote them, in a message."""
        devices = runtime.local_device_count()
        if self.of_process:
            return (
                f"train_micro_batch_size_per_gpu, which counts the rows of a process here, "
                f"{self.micro_batch} on each of its {devices} devices"
            )
        return f"train_micro_batch_size_per_gpu ({self.micro_batch}) x {devices} local devices"

    def batches(self, inputs: Sequence[Rows], *, training: bool) -> frozenset[str]:
        """The paths of those of `inputs` that are batches.

        Raises:
            SpmdZeroUsageError: in training, none has the rows of a whole micro-batch or of one
                that may be short; in evaluation, the first one's rows can't be divided over the
                devices.
        """
        if not inputs:
            return frozenset()
        whole = _with(self.whole, inputs)
        kind = self.whole, tuple(item.path for item in inputs)
        if whole and training:
            self._whole.setdefault(kind, whole)
        known = [item for item in inputs if item.path in self._whole.get(kind, ())]
        if not training:
            candidates = known or inputs
            return whole or _with(self._shared(candidates[0]), candidates)
        if whole:
            self._refuse_mixed(known)
            return whole
        if known:
            return self._short(known)
        if inputs[0].count == self.announced or (self.any_number and inputs[0].count < self.whole):
            self._shared(inputs[0])
            return _with(inputs[0].count, inputs)
        raise self._wrong(inputs[0])

    def _short(self, batches: Sequence[Rows]) -> frozenset[str]:
        self._refuse_mixed(batches)
        first = batches[0]
        if not 0 < first.count < self.whole:
            raise self._wrong(first)
        rows, devices = self._shared(first), runtime.local_device_count()
        if rows != self.announced and rows not in self._said:
            self._said.add(rows)
            logger.warning(
                "a micro-batch of %d rows instead of %d: each of %d devices trains on %d, in a "
                "program of its own. DataLoader(drop_last=True) leaves the last short batch of "
                "an epoch out",
                rows, self.whole, devices, rows if rows % devices else rows // devices,
            )  # fmt: skip
        return frozenset(item.path for item in batches)

    def _shared(self, item: Rows) -> int:
        devices = runtime.local_device_count()
        if item.count % devices and not (self.any_number and runtime.process_count() == 1):
            up = -(-item.count // devices) * devices
            raise SpmdZeroUsageError(
                f"{item}, which {devices} local devices can't share equally. Leave the last short "
                f"batch of an epoch out with DataLoader(drop_last=True), pad it to {up} rows, or "
                "take the loader of initialize(training_data=...), which repeats rows as "
                "DistributedSampler does"
            )
        return item.count

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
            "this host's devices at once"
        )
        if 0 < item.count < self.whole:
            message += (
                "; a shorter micro-batch, such as the last one of an epoch, trains after the "
                "first whole one"
            )
        return SpmdZeroUsageError(message)


def _with(count: int, inputs: Sequence[Rows]) -> frozenset[str]:
    return frozenset(item.path for item in inputs if item.count == count)
