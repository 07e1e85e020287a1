"""Counts a client's batch sizes for each device, as on GPUs, where SPMDZERO_ROWS=device asks so.

A client counts the rows of a process, and one process drives all devices. So accelerate's loaders
join what the processes of as many GPUs would have got, in their order, and accelerate's schedules
go on as many times.
"""

import copy
import itertools
import math
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.data

from spmdzero._after_import import after_import
from spmdzero._names import did_you_mean
from spmdzero.backend import local_replicas, runtime
from spmdzero.config import mesh_axes_of
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._replaced import in_place_of
from spmdzero.plan import MeshSpec

VARIABLE = "SPMDZERO_ROWS"
_CHOICES = ("process", "device")
_INSTEAD = "Leave {}=device out, and multiply the batch size by the number of devices"


def of_a_device() -> bool:
    """Whether a client's batch sizes are those of a device.

    Raises:
        SpmdZeroUsageError: the variable SPMDZERO_ROWS has another value than its two.
    """
    told = os.environ.get(VARIABLE) or "process"
    if told not in _CHOICES:
        fix = did_you_mean(told, _CHOICES) or f"It is one of {', '.join(_CHOICES)}"
        raise SpmdZeroUsageError(f"{VARIABLE}={told}: there is no such choice. {fix}")
    return told == "device"


def refuse(what: str) -> None:
    """Refuses rows of a device where `what` is at work.

    Raises:
        SpmdZeroUsageError: rows of a device are asked for.
    """
    if of_a_device():
        raise SpmdZeroUsageError(f"{VARIABLE}=device: {what}. {_INSTEAD.format(VARIABLE)}")


def replicas_under(config: Mapping[str, Any]) -> int:
    """Number of this process's replicas under a config: its devices, unless some share rows.

    Raises:
        SpmdZeroConfigError: the config's mesh doesn't fit the devices.
    """
    spec = MeshSpec.resolve(mesh_axes_of(config), device_count=runtime.device_count())
    return max(1, local_replicas(spec))


def joined() -> int:
    """The number of devices whose batches accelerate has as one; 1 where nobody asks for that."""
    state: Any = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    known = of_a_device() and state is not None and state._shared_state
    plugin = state().deepspeed_plugin if known else None
    return 1 if plugin is None else replicas_under(plugin.deepspeed_config)


def shorten_dummies(prepared: Iterable[Any]) -> None:
    """Divides the steps of accelerate's `DummyScheduler`s by the devices.

    accelerate divides `total_num_steps` by its processes, whose number is that of the hosts, and
    leaves `warmup_num_steps` (`accelerate/accelerator.py`, `_prepare_deepspeed`).
    """
    count = joined()
    for given in prepared if count > 1 else ():
        if type(given).__name__ == "DummyScheduler":
            steps = getattr(given, "total_num_steps", None)
            if isinstance(steps, int):
                given.total_num_steps = math.ceil(steps / count)


def follow_imports() -> None:
    """Makes accelerate's loaders and schedules, and the Trainer's counts, those of the devices."""

    def join_loaders(module: Any) -> None:
        @in_place_of(module, "prepare_data_loader")
        def prepare(original: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            count = joined()
            if count == 1:
                return original(dataloader, *args, **kwargs)
            names = dict(zip(("device", "num_processes", "process_index"), args, strict=False))
            told = names | kwargs
            joining = _joining(module, dataloader, told, count)
            return original(joining, *args, **kwargs)

    def step_schedules(module: Any) -> None:
        states = module.AcceleratorState

        def counted() -> Any:
            return types.SimpleNamespace(num_processes=states().num_processes * joined())

        # It asks for nothing else, and goes on once for each process.
        module.AcceleratorState = counted

    def count_rows(module: Any) -> None:
        @in_place_of(module.Trainer, "get_total_train_batch_size")
        def total(original: Any, self: Any, *args: Any) -> int:
            return original(self, *args) * (joined() if self.is_deepspeed_enabled else 1)

    after_import("accelerate.data_loader", join_loaders)
    after_import("accelerate.scheduler", step_schedules)
    after_import("transformers.trainer", count_rows)


def _joining(module: Any, dataloader: Any, told: Mapping[str, Any], count: int) -> Any:
    """A loader of the same data that yields `count` batches as one.

    Raises:
        SpmdZeroUsageError: it isn't known how processes would share this loader's rows.
    """
    if isinstance(dataloader.dataset, torch.utils.data.IterableDataset):
        refuse("a data set that is only iterated can't be shared out by its indices")
    if told.get("split_batches"):
        refuse("split_batches=True makes a loader's batch that of all processes")
    if told.get("dispatch_batches"):
        refuse("dispatch_batches=True has the first process read what all get")
    if (told.get("num_processes") or module.PartialState().num_processes) > 1:
        refuse("loaders of several hosts aren't joined yet")
    sampler = dataloader.batch_sampler
    if sampler is None or isinstance(dataloader.sampler, torch.utils.data.BatchSampler):
        refuse("a loader without a batch_size, or whose sampler makes batches, isn't joined")
    # The user's own loader stays as it is; torch lets nobody set this attribute.
    joining = copy.copy(dataloader)
    vars(joining)["batch_sampler"] = JoinedBatches(
        sampler, shard=module.BatchSamplerShard, count=count, even=told.get("even_batches", True)
    )
    return joining


class JoinedBatches(torch.utils.data.BatchSampler):
    """A batch sampler whose batch is what the batch samplers of `count` processes would yield.

    Args:
        batch_sampler: yields the batches of a single process.
        shard: accelerate's `BatchSamplerShard`, which gives a process its batches.
        count: number of processes.
        even: whether the last rows are filled up from the first, as `even_batches` says.

    Attributes:
        batch_sampler: the one that is given; accelerate sets its sampler and its epoch.
        batch_size: rows of a joined batch, None if the given one's vary.
        drop_last: whether rows that are no whole batch for each process are left out.
    """

    def __init__(self, batch_sampler: Any, *, shard: Any, count: int, even: bool) -> None:
        self.batch_sampler, self._shard, self._count, self._even = batch_sampler, shard, count, even
        rows = getattr(batch_sampler, "batch_size", None)
        self.batch_size: Any = None if rows is None else rows * count
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def sampler(self) -> Any:
        """The sampler of indices, in whose place accelerate sets one with a seed of its own."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def _shards(self, samplers: Iterator[Any]) -> list[Any]:
        return [
            self._shard(
                sampler, num_processes=self._count, process_index=index, even_batches=self._even
            )
            for index, sampler in zip(range(self._count), samplers, strict=False)
        ]

    def __len__(self) -> int:
        return max(map(len, self._shards(itertools.repeat(self.batch_sampler))))

    def __iter__(self) -> Iterator[list[int]]:
        # A random sampler would draw another order for each shard, so that it is iterated once.
        copies = itertools.tee(self.batch_sampler, self._count)
        shards = self._shards(_Copy(each, self.batch_sampler) for each in copies)
        for batches in itertools.zip_longest(*shards, fillvalue=()):
            yield [index for batch in batches for index in batch]


class _Copy:
    """Iterates a batch sampler's batches that others iterate too."""

    def __init__(self, batches: Iterator[Any], of: Any) -> None:
        self._batches = batches
        self.batch_size = getattr(of, "batch_size", None)
        self.drop_last = getattr(of, "drop_last", False)

    def __iter__(self) -> Iterator[Any]:
        # The shard adds to the batches that it is given.
        return (list(batch) for batch in self._batches)
