"""Chooses the dataset rows that this host reads for each global micro-batch."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Sampler

from spmdzero.data._seeds import SeededIndices
from spmdzero.errors import SpmdZeroUsageError


class ReplicaBatchSampler(Sampler[list[int]]):
    """Dataset indices of this host's replicas, one list per global micro-batch.

    A list holds `micro_batch` rows for the first local replica, then as many for the next, and so
    on; hosts in order of their replicas make up the global micro-batch. Each replica gets the
    rows of the DeepSpeed rank of its number: torch's `DistributedSampler` (shuffled, seed 0,
    padded by repeating from the front, never dropping) cut into batches of `micro_batch`
    (DeepSpeed, runtime/dataloader.py, `DeepSpeedDataLoader`; evaluation loaders pass
    `shuffle=False`, runtime/engine.py, `deepspeed_io`). Without `drop_last` the last list is
    shorter, by the same number of rows for every replica.

    The epoch changes only by `set_epoch`. DeepSpeed never calls it, so that all passes have one
    order unless the script does.

    Args:
        length: rows of the dataset.
        micro_batch: rows per replica in one micro-batch.
        replicas: replicas of all hosts.
        local_replicas: the replicas of this host, within `range(replicas)`.
        shuffle: whether each epoch has a new order, the same on all hosts.
        seed: of the order; the epoch is added to it.
        drop_last: whether to leave out the last, shorter micro-batch.

    Raises:
        SpmdZeroUsageError: a size below 1, or `local_replicas` empty or out of range.
    """

    def __init__(
        self,
        *,
        length: int,
        micro_batch: int,
        replicas: int,
        local_replicas: range,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        sizes = {"length": length, "micro_batch": micro_batch, "replicas": replicas}
        for name, size in sizes.items():
            if size < 1:
                raise SpmdZeroUsageError(f"{name} = {size}: at least 1 is needed.")
        if not local_replicas or not all(0 <= replica < replicas for replica in local_replicas):
            raise SpmdZeroUsageError(
                f"local_replicas = {local_replicas}: this host needs at least one replica, each "
                f"within range({replicas})."
            )
        self.length = length
        self.micro_batch = micro_batch
        self.replicas = replicas
        self.local_replicas = local_replicas
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._next = 0, 0

    def __len__(self) -> int:
        """Number of micro-batches in a whole epoch, wherever the next iteration starts."""
        whole, rest = divmod(self._rows_per_replica(), self.micro_batch)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def samples(self) -> int:
        """Number of samples of all replicas in an epoch, including those repeated to fill it up."""
        return self._rows_per_replica() * self.replicas

    def __iter__(self) -> Iterator[SeededIndices]:
        """The rest of the epoch after `skip`, else the whole epoch."""
        # This runs at the first batch: a DataLoader with workers begins twice, and reads once.
        (start, seed), self._next = self._next, (0, 0)
        table = self._local_table()
        for batch in range(start, len(self)):
            first = batch * self.micro_batch
            rows = table[:, first : first + self.micro_batch].ravel().tolist()
            yield SeededIndices(rows, seed=seed, place=batch)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, and so the order, of iterations that start from now on."""
        self.epoch = epoch

    def skip(self, batches: int, *, seed: int = 0) -> None:
        """Starts the next iteration after this many micro-batches; later ones start at 0 again.

        Args:
            batches: number of micro-batches.
            seed: of the random numbers drawn in reading that iteration's rows.

        Raises:
            SpmdZeroUsageError: the epoch has no such position.
        """
        if not 0 <= batches <= len(self):
            raise SpmdZeroUsageError(
                f"skip({batches}): the epoch has {len(self)} micro-batches of {self.micro_batch} "
                f"rows for each of {self.replicas} replicas."
            )
        self._next = batches, seed

    def _rows_per_replica(self) -> int:
        return math.ceil(self.length / self.replicas)

    def _local_table(self) -> np.ndarray:
        """Indices of a whole epoch, [local replicas, rows per replica], int64."""
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator).numpy()
        else:
            order = np.arange(self.length)
        rows = self._rows_per_replica()
        # np.resize repeats from the front, as DistributedSampler pads.
        table = np.resize(order, (rows, self.replicas))
        return table[:, list(self.local_replicas)].T
