"""A fork of a process that has devices has none: it is told so, and doesn't wait for ever."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from spmdzero.backend import runtime


class OnDevices(Dataset[Any]):
    """Its samples are computed on the devices."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.ones(3, device="xla:0") + index).cpu()


# Python's own of each fork beside threads, from 3.12 on.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loaders_worker_that_computes_on_the_devices_is_refused() -> None:
    runtime.start()
    assert OnDevices()[1].tolist() == [2.0] * 3
    # The warning is JAX's own, in a loader that isn't the engine's.
    with (
        pytest.warns(RuntimeWarning, match="os.fork"),
        pytest.raises(RuntimeError, match=r"was forked from one that uses the devices \(a DataL"),
    ):
        # The alarm of torch's loader ends what would hang.
        next(iter(DataLoader(OnDevices(), num_workers=1, timeout=60)))
