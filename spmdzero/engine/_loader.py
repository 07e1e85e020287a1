"""A loader whose micro-batches are born sharded on the devices, a few ahead of their use."""

import collections
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from spmdzero.engine._inputs import InputPlacer
from spmdzero.engine._loader_progress import LoaderProgress, drawn_seed
from spmdzero.engine._loader_seeds import SeededBatches, SeededRows
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
            self._batches = options["batch_sampler"] = SeededBatches(self.sampler)
            dataset = SeededRows(dataset)
        # What torch draws for its workers is drawn here, so that a resumed epoch can repeat it.
        self._generator = torch.Generator()
        self._loader = DataLoader(dataset, generator=self._generator, **options)
        self._progress = LoaderProgress()
        self._resumed: LoaderProgress | None = None

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

    def state_dict(self) -> dict[str, Any]:
        """How far the latest epoch has come, for `load_state_dict` of a loader of this dataset."""
        epoch = self.sampler.epoch if self.sampler is not None else 0
        return (self._resumed or self._progress).state_dict(epoch=epoch, rows=self._all_rows)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next epoch the rest of the saved one, batch for batch.

        With another number of rows in a micro-batch it begins at the same sample, or, where no
        micro-batch does, with up to one micro-batch that was seen already. An iterable dataset is
        read from its start and what was seen is thrown away.

        Raises:
            SpmdZeroUsageError: the dataset has no such position.
        """
        resumed = LoaderProgress.load(state, rows=self._all_rows)
        if self.sampler is not None:
            self.sampler.load_state_dict({"epoch": state["epoch"], "position": resumed.handed_out})
        self._resumed = resumed

    @property
    def _all_rows(self) -> int:
        return self._placer.micro_batch * self._mesh.size

    def endless(self) -> Iterator[Any]:
        """Micro-batches of one epoch after another, each in its own order.

        Raises:
            SpmdZeroUsageError: the dataset has no micro-batch at all.
        """
        while True:
            # A resumed epoch may have been at its end.
            empty = self._resumed is None
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
        """One epoch, or the rest of a resumed one, read and uploaded a few micro-batches ahead.

        In this thread: a dataset that draws random numbers shares torch's CPU generator with the
        replicas' random numbers, and a thread of its own would make a run unrepeatable.
        Processes that read ahead are `num_workers`.
        """
        resumed, self._resumed = self._resumed, None
        progress = self._progress = resumed or LoaderProgress(seed=drawn_seed())
        ready: collections.deque[tuple[Any, int]] = collections.deque()
        try:
            for batch in self._read(progress):
                rows = self._count(batch)
                if self._is_whole(rows):
                    place = functools.partial(self._place, rows=rows)
                    ready.append((map_tensors(batch, place), rows))
                else:
                    progress.drop()
                if len(ready) > _AHEAD:
                    yield self._hand_out(ready, progress)
            while ready:
                yield self._hand_out(ready, progress)
        finally:
            self._placer.short_rows = None

    def _read(self, progress: LoaderProgress) -> Iterator[Any]:
        self._generator.manual_seed(progress.seed)
        if self.sampler is not None:
            self._batches.seed = progress.seed
        unread = 0 if self.sampler is not None else progress.handed_out
        batches = iter(self._loader)
        while True:
            with progress.reading(seen=unread > 0):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            if unread:
                unread -= 1
            else:
                yield batch

    def _hand_out(
        self, ready: "collections.deque[tuple[Any, int]]", progress: LoaderProgress
    ) -> Any:
        batch, rows = ready.popleft()
        # Before it is handed out: whoever holds it has it when he saves.
        progress.hand_out()
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
