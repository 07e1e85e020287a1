"""A loader whose micro-batches are created as shards on the devices, some ahead of their use."""

import collections
import functools
import logging
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from spmdzero.backend import Mesh, local_replicas, map_tensors, runtime
from spmdzero.data._inputs import InputPlacer
from spmdzero.data._position import LoaderPosition, Pass, in_micro_batches_of
from spmdzero.data._sampler import ReplicaBatchSampler
from spmdzero.data._seeds import SeededRows
from spmdzero.errors import SpmdZeroUsageError

logger = logging.getLogger("spmdzero")
_AHEAD = 2  # uploads run during a step; more would only cost device memory


class ZeroDataLoader:
    """Micro-batches of a dataset, as tensors on the devices, which share the rows.

    Each replica gets the rows that the DeepSpeed rank of its number would get. Each host loads
    and yields only the rows of its own devices.

    Args:
        dataset: map-style, or iterable: then each host's iterator must yield its own part.
        mesh: the devices.
        placer: that of the engine, which learns here about a short last micro-batch.
        steps: returns how many micro-batches the engine has trained so far.
        batch_dim: the batch dim of the tensors that `collate_fn` makes.
        shuffle: a new order for each epoch set by `set_epoch`; map-style datasets only.
        drop_last: leave out the last micro-batch of an epoch when it is short.
        collate_fn: makes one batch of the samples of all local devices; torch's by default.
        num_workers: number of processes that read samples.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        mesh: Mesh,
        placer: InputPlacer,
        steps: Callable[[], int],
        batch_dim: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> None:
        self._mesh, self._batch_dim = mesh, batch_dim
        self._local = local_replicas(mesh.spec)
        self._batch_rows, self._rows = placer.rows, placer.rows.whole
        self.sampler: ReplicaBatchSampler | None = None
        options: dict[str, Any] = {"collate_fn": collate_fn, "num_workers": num_workers}
        if isinstance(dataset, IterableDataset):
            options |= {"batch_size": self._rows, "drop_last": drop_last}
        else:
            first = runtime.process_index() * self._local
            self.sampler = ReplicaBatchSampler(
                length=_length(dataset),
                micro_batch=placer.rows.micro_batch,
                replicas=mesh.replicas,
                local_replicas=range(first, first + self._local),
                shuffle=shuffle,
                drop_last=drop_last,
            )
            if not len(self.sampler):
                logger.warning(
                    "the loader has no batches: %d rows are less than one batch of %d, and "
                    '"dataloader_drop_last" is true. Set it to false, or use your own DataLoader',
                    self.sampler.length, placer.rows.micro_batch * mesh.replicas,
                )  # fmt: skip
            options["batch_sampler"] = self.sampler
            dataset = SeededRows(dataset)
        # Seeds for workers are drawn here, where torch would draw them: a resumed epoch repeats
        # them.
        self._generator = torch.Generator()
        self._loader = DataLoader(dataset, generator=self._generator, **options)
        # The placer's micro-batch may change, but this loader's may not.
        self._all_rows = placer.rows.micro_batch * mesh.replicas
        self._position = LoaderPosition(rows=self._all_rows, steps=steps)
        self._passes, self._said_short = 0, False
        self._stream: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Number of global micro-batches in an epoch.

        Raises:
            TypeError: the dataset is iterable and has no length.
        """
        return len(self._loader)

    @property
    def epoch(self) -> int:
        """The epoch that determines the order of the next iteration."""
        return self._passes if self.sampler is None else self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, and so the order, of iterations that start from now on.

        A resumed epoch ends here, unless it is this one.
        """
        if self.sampler is None:
            self._passes = epoch
        else:
            self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position in the latest epoch, for `load_state_dict` of a loader of this dataset."""
        return self._position.state_dict(self.epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration the rest of the saved epoch, batch for batch.

        It is a whole epoch if the saved one had ended or not begun, or after `set_epoch` has set
        another one. If the state was saved after the last micro-batch, but before the loop ended,
        the rest is empty.

        With another number of rows in a micro-batch the rest begins at the same sample, or, if no
        micro-batch begins there, repeats less than one micro-batch. An iterable dataset is read
        from its start, and the samples that were seen are thrown away.

        Raises:
            SpmdZeroUsageError: the dataset has no such position.
        """
        state = self.adapted(state)
        self.set_epoch(state["epoch"])
        self._position.resume(state)

    def adapted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Converts another loader's state to micro-batches of this one's size; changes nothing.

        Raises:
            SpmdZeroUsageError: the dataset has no such position.
        """
        sampler = self.sampler
        state = in_micro_batches_of(
            self._all_rows,
            state,
            samples=None if sampler is None else sampler.samples,
            length=None if sampler is None else len(sampler),
        )
        if sampler is not None:
            # This checks the position; each iteration sets its own start.
            sampler.skip(state["handed_out"])
        return state

    def endless(self) -> Iterator[Any]:
        """Yields the micro-batches of one epoch after another, each epoch in its own order.

        Raises:
            SpmdZeroUsageError: the dataset has not even one micro-batch.
        """
        while True:
            done = yield from self._iterate()
            if not done.handed_out:
                raise SpmdZeroUsageError(
                    f"the dataset has not one whole micro-batch of {self._rows} rows"
                )
            self.set_epoch(self.epoch + 1)

    def stream(self) -> Iterator[Any]:
        """The endless iteration that `train_batch` reads: the same one at each call."""
        if self._stream is None:
            self._stream = self.endless()
        return self._stream

    def end_stream(self) -> None:
        """Has the next `stream` be a new iteration."""
        self._stream = None

    def __iter__(self) -> Iterator[Any]:
        """Yields one epoch, or the rest of a resumed one, reading a few micro-batches ahead.

        This runs in the caller's thread: a dataset that draws random numbers shares torch's CPU
        generator with the replicas, and in a separate thread a run would not be repeatable. Use
        `num_workers` for processes that read ahead.
        """
        done = yield from self._iterate()
        if done.handed_out == done.start > 0:
            logger.info(
                "epoch %d was saved after its last micro-batch: the rest of it, which this "
                "iteration is, has none. The next one is a whole epoch", done.epoch
            )  # fmt: skip

    def _iterate(self) -> Generator[Any, None, Pass]:
        with self._position.iteration(self.epoch) as current:
            ready: collections.deque[tuple[Any, int]] = collections.deque()
            try:
                for batch in self._read(current):
                    rows = self._count(batch)
                    if self._is_whole(rows):
                        place = functools.partial(self._place, rows=rows)
                        ready.append((map_tensors(batch, place), rows))
                    else:
                        current.drop()
                    if len(ready) > _AHEAD:
                        yield self._hand_out(ready, current)
                while ready:
                    yield self._hand_out(ready, current)
            finally:
                self._batch_rows.announced = None
        return current

    def _read(self, current: Pass) -> Iterator[Any]:
        self._generator.manual_seed(current.seed)
        unread = current.handed_out
        if self.sampler is not None:
            self.sampler.skip(current.handed_out, seed=current.seed)
            unread = 0
        with warnings.catch_warnings():
            # JAX warns that a fork may hang if it computes on the devices; workers only read
            # samples.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            batches = iter(self._loader)
        while True:
            with current.reading(seen=unread > 0):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            if unread:
                unread -= 1
            else:
                yield batch

    def _hand_out(self, ready: "collections.deque[tuple[Any, int]]", current: Pass) -> Any:
        batch, rows = ready.popleft()
        # Record it before yielding it: a caller who saves the state then has this batch.
        self._position.hand_out(current)
        self._announce(rows)
        return batch

    def _announce(self, rows: int) -> None:
        short = rows != self._rows
        if short and not self._said_short:
            self._said_short = True
            logger.info(
                "the last micro-batch of an epoch has %d rows instead of %d and compiles a "
                'program of its own; "dataloader_drop_last": true leaves it out', rows, self._rows
            )  # fmt: skip
        self._batch_rows.announced = rows if short else None

    def _is_whole(self, rows: int) -> bool:
        if rows % self._local == 0:
            return True
        if self.sampler is not None:
            raise SpmdZeroUsageError(
                f"collate_fn made a batch of {rows} rows, which {self._local} "
                "devices can't share equally: one row for each sample is expected"
            )
        logger.warning(
            "dropped the last %d rows of an iterable dataset: %d devices can't share them equally",
            rows,
            self._local,
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
            placed = self._mesh.place(tensor, self._mesh.batch_spec(tensor.dim(), dim))
            across = self._mesh.across
            return placed if across is None else across.own_rows(placed, dim)
        return self._mesh.place(tensor)


def _length(dataset: Any) -> int:
    kind = type(dataset).__name__
    try:
        length = len(dataset)
    except TypeError as error:
        raise SpmdZeroUsageError(
            f"{kind} has no length: a map-style dataset needs __len__, one without is an "
            "IterableDataset"
        ) from error
    if length < 1:
        raise SpmdZeroUsageError(
            f"the dataset (a {kind}) has length {length}: there is nothing to train on. Look at "
            "what filled it: a path without files, a filter that keeps nothing"
        )
    return length
