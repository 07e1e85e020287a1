"""Random numbers of a loader that can be continued in the middle of an epoch."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

_STRIDE = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: neighbouring batches differ in all bits


class SeededIndices(list[int]):
    """The rows of one micro-batch, and the seed of what is random in reading them."""

    seed = 0


class SeededBatches(Sampler[list[int]]):
    """The batches of `batches`, each with a seed that only depends on its place in the epoch.

    Args:
        batches: yields rows, from its `start_batch` on.

    Attributes:
        seed: of the epoch.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.seed = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of the epoch."""
        # Those of this iteration: another may begin before it ends.
        first, seed = self._batches.start_batch, self.seed
        for place, rows in enumerate(self._batches, start=first):
            seeded = SeededIndices(rows)
            seeded.seed = (seed + place * _STRIDE) % 2**64
            yield seeded


class SeededRows(Dataset[Any]):
    """A dataset whose worker processes begin each batch with that batch's own seed.

    Torch seeds a worker once an epoch: what it draws for a batch then depends on all batches that
    it has read before, which a resumed run has not.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, rows: list[int]) -> list[Any]:
        """The samples of one batch."""
        if get_worker_info() is not None and isinstance(rows, SeededIndices):
            torch.manual_seed(rows.seed)
            random.seed(rows.seed)
            np.random.seed(rows.seed % 2**32)
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(list(rows))
        return [self._dataset[row] for row in rows]
