"""Collectives of torch.distributed in a forward of several hosts are over the devices of all."""

import numpy as np
import pytest

from tests.comm.test_trained_in_forward import CLOSE
from tests.comm.trained_in_forward import by_torch
from tests.hosts.hosts import run_hosts

MODULE, DEVICES = "tests.hosts.collecting", 4


@pytest.mark.slow
def test_the_rows_of_all_hosts_are_gathered() -> None:
    expected, _ = by_torch(DEVICES, 1, norm=True)
    for losses in run_hosts(MODULE, "region", str(DEVICES), count=2, devices=DEVICES // 2):
        np.testing.assert_allclose(losses, expected, **CLOSE)


@pytest.mark.slow
def test_a_global_forward_has_nothing_to_ask_other_hosts() -> None:
    for refused in run_hosts(MODULE, "global", str(DEVICES), count=2, devices=DEVICES // 2):
        assert "trained_in_forward.py:" in refused
        assert '"forward": "global"} on several hosts' in refused
