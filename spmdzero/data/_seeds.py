"""Random numbers of worker processes, repeatable from the middle of an epoch."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from spmdzero.backend import current, runtime


def host_generators() -> dict[str, Any]:
    """The states of torch's CPU generator, NumPy's and Python's, by name, in a form to be saved."""
    numpy = np.random.get_state(legacy=False)
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "python": [version, list(words), gauss],
    }


def generators() -> dict[str, Any]:
    """The states of the host's generators, and of the devices' own."""
    return {**host_generators(), current().device_type: runtime.generator_state()}


def set_generators(states: Mapping[str, Any]) -> None:
    """Restores the generators whose states are given."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "numpy" in states:
        saved = states["numpy"]
        key = np.array(saved["state"]["key"], dtype=np.uint32)
        np.random.set_state({**saved, "state": {**saved["state"], "key": key}})
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
    own = current().device_type
    if own in states:
        runtime.seed(states[own])


_STRIDE = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: neighbouring batches differ in all bits


class SeededIndices(list[int]):
    """The rows of one micro-batch, and the seed of random numbers drawn in reading them.

    Args:
        rows: of the dataset.
        seed: of the epoch.
        place: of the micro-batch in the epoch.
    """

    def __init__(self, rows: list[int], *, seed: int, place: int) -> None:
        super().__init__(rows)
        self.seed = (seed + place * _STRIDE) % 2**64


class SeededRows(Dataset[Any]):
    """A dataset whose worker processes begin each batch with that batch's own seed.

    torch seeds a worker once per epoch: its draws for a batch then depend on all batches that it
    has read before, which differ in a resumed run.
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
