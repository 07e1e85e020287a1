"""Trainer, accelerate and Lightning on JAX, with and without a torch_xla that they could find."""

import json

import pytest

from tests.support.processes import run_python

CLIENTS = ("trainer", "accelerate", "lightning")
# fp32 of two orders of summation: 1e-7 apart in each operation, and six steps of AdamW.
TOLERANCE = 1e-5


@pytest.mark.parametrize("torch_xla", ["hidden", "there"])
def test_clients_train_on_jax_and_never_import_torch_xla(torch_xla: str) -> None:
    for client in ("transformers", *CLIENTS[1:]):
        pytest.importorskip(client)
    printed = run_python("-m", "tests.jax_backend.clients", torch_xla, devices=8, fresh=True)
    found = json.loads(printed.splitlines()[-1])
    assert found["backend"] == "jax"
    assert found["torch_xla"] == []
    for client in CLIENTS:
        assert found[client] == pytest.approx(found["plain"], rel=TOLERANCE), client
    assert found["plain"][-1] < found["plain"][0] - 1
