"""A loader whose micro-batches are born sharded on the devices, a few ahead of their use."""

import collections
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from spmdzero.engine._inputs import InputPlacer
from spmdzero.engine._sampler import ReplicaBatchSampler
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.xla import DeviceMesh, map_tensors, runtime

logger = logging.getLogger("spmdzero")
_AHEAD = 2  # uploads run while a step does; more only costs device memory


class ZeroDataLoader:
    """Global micro-batches of a dataset, as tensors on the devices.

    Each replica gets the rows that the DeepSpeed rank of its number would get. Each host loads
    the rows of its own devices only.

    Args:
        dataset: map-style, or iterable: then each host's iterator must yield its own part.
        mesh: the devices.
        placer: the engine's, which is told about a short last micro-batch.
        batch_dim: the dim that `collate_fn` makes the batch.
        shuffle: a new order for each epoch set by `set_epoch`; map-style datasets only.
        drop_last: leave out the last micro-batch of an epoch when it is short.
        collate_fn: samples of all local devices' rows -> one batch; torch's default.
        num_workers: processes that read samples.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        mesh: DeviceMesh,
        placer: InputPlacer,
        batch_dim: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> None:
        self._mesh, self._placer, self._batch_dim = mesh, placer, batch_dim
        self._rows = placer.micro_batch * runtime.local_device_count()
        self.sampler: ReplicaBatchSampler | None = None
        options: dict[str, Any] = {"collate_fn": collate_fn, "num_workers": num_workers}
        if isinstance(dataset, IterableDataset):
            options |= {"batch_size": self._rows, "drop_last": drop_last}
        else:
            first = runtime.process_index() * runtime.local_device_count()
            self.sampler = ReplicaBatchSampler(
                length=_length(dataset),
                micro_batch=placer.micro_batch,
                replicas=mesh.size,
                local_replicas=range(first, first + runtime.local_device_count()),
                shuffle=shuffle,
                drop_last=drop_last,
            )
            options["batch_sampler"] = self.sampler
        self._loader = DataLoader(dataset, **options)

    def __len__(self) -> int:
        """Global micro-batches in an epoch.

        Raises:
            TypeError: the dataset is iterable and has no length.
        """
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the epochs that start from now on."""
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)

    def endless(self) -> Iterator[Any]:
        """Micro-batches of one epoch after another, each in its own order.

        Raises:
            SpmdZeroUsageError: the dataset has no micro-batch at all.
        """
        while True:
            empty = True
            for batch in self:
                empty = False
                yield batch
            if empty:
                raise SpmdZeroUsageError(
                    f"the dataset has not one whole micro-batch of {self._rows} rows"
                )
            if self.sampler is not None:
                self.sampler.set_epoch(self.sampler.epoch + 1)

    def __iter__(self) -> Iterator[Any]:
        """One epoch, read and uploaded a few micro-batches ahead.

        In this thread: a dataset that draws random numbers shares torch's CPU generator with the
        replicas' random numbers, and a thread of its own would make a run unrepeatable.
        Processes that read ahead are `num_workers`.
        """
        ready: collections.deque[tuple[Any, int]] = collections.deque()
        try:
            for batch in self._loader:
                rows = self._count(batch)
                if self._is_whole(rows):
                    place = functools.partial(self._place, rows=rows)
                    ready.append((map_tensors(batch, place), rows))
                if len(ready) > _AHEAD:
                    yield self._hand_out(ready)
            while ready:
                yield self._hand_out(ready)
        finally:
            self._placer.short_rows = None

    def _hand_out(self, ready: "collections.deque[tuple[Any, int]]") -> Any:
        batch, rows = ready.popleft()
        self._announce(rows)
        return batch

    def _announce(self, rows: int) -> None:
        short = rows != self._rows
        if short and self._placer.short_rows != rows:
            logger.info(
                "the last micro-batch of an epoch has %d rows instead of %d and compiles a "
                'program of its own; "dataloader_drop_last": true leaves it out', rows, self._rows
            )  # fmt: skip
        self._placer.short_rows = rows if short else None

    def _is_whole(self, rows: int) -> bool:
        if rows % runtime.local_device_count() == 0:
            return True
        if self.sampler is not None:
            raise SpmdZeroUsageError(
                f"collate_fn made a batch of {rows} rows, which {runtime.local_device_count()} "
                "devices can't share equally: one row for each sample is expected"
            )
        logger.warning(
            "dropped the last %d rows of an iterable dataset: %d devices can't share them equally",
            rows,
            runtime.local_device_count(),
        )
        return False

    def _count(self, batch: Any) -> int:
        sizes: list[int] = []

        def look(_: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() > self._batch_dim:
                sizes.append(tensor.shape[self._batch_dim])
            return tensor

        map_tensors(batch, look)
        if not sizes:
            raise SpmdZeroUsageError(
                "the dataset's batches hold no tensor with a batch dim: collate_fn must make some"
            )
        return self._rows if self._rows in sizes else sizes[0]

    def _place(self, _: str, tensor: torch.Tensor, *, rows: int) -> torch.Tensor:
        dim = self._batch_dim
        if tensor.dim() > dim and tensor.shape[dim] == rows:
            return self._mesh.place(tensor, self._mesh.batch_spec(tensor.dim(), dim))
        return self._mesh.place(tensor)


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise SpmdZeroUsageError(
            f"{type(dataset).__name__} has no length: a map-style dataset needs __len__, one "
            "without is an IterableDataset"
        ) from error
