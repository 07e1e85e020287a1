"""Random draws on a mesh with the axis tensor: those of the replica, whatever devices share it."""

import json
from typing import Any

import pytest
import torch

from tests.jax_backend.draws_of_pairs import REPLICAS, trained
from tests.support.processes import run_module


@pytest.mark.parametrize(
    "case",
    [
        {"stage": 3, "scan": "off", "blocks": 1},
        pytest.param({"stage": 2, "scan": "off", "blocks": 2}, marks=pytest.mark.slow),
        pytest.param({"stage": 3, "scan": "on", "blocks": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_devices_of_a_replica_draw_what_one_device_would(case: dict[str, Any]) -> None:
    module = "tests.jax_backend.draws_of_pairs"
    alone = json.loads(run_module(module, json.dumps(case), devices=REPLICAS).splitlines()[-1])
    found = trained({"fsdp": REPLICAS, "tensor": 2}, **case)
    # Other masks change the first loss by half a hundredth.
    torch.testing.assert_close(found, alone, rtol=1e-6, atol=0.0)
