"""Trainer, accelerate and Lightning on JAX, with and without a torch_xla that they could find."""

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.integrations.test_accelerate import TOLERANCE, launched, loop
from tests.jax_backend.clients import CLIENTS
from tests.support.processes import run_python

# `make test-newest` installs none.
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("transformers", "accelerate", "lightning")),
    reason="the clients aren't installed",
)


# Importing the clients takes as long as one of these does.
_TOGETHER = """
import json
from tests.jax_backend import clients, clients_of_long_rows

clients.find_only_jax()
print(json.dumps({
    "without torch_xla": clients.trained(),
    "tensor": clients.over_pairs("tensor"),
    "long rows": clients_of_long_rows.trained("accelerate"),
}))
"""


def printed_by(*arguments: str, **variables: str) -> Any:
    printed = run_python(*arguments, devices=8, fresh=True, **variables)
    return json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="module")
def together() -> dict[str, Any]:
    return printed_by("-c", _TOGETHER)


def seen(kind: str) -> Any:
    return printed_by("-m", "tests.jax_backend.clients", kind)


@pytest.mark.parametrize(
    "kind", ["without torch_xla", pytest.param("with torch_xla", marks=pytest.mark.slow)]
)
def test_clients_train_on_jax_and_never_import_torch_xla(
    together: dict[str, Any], kind: str
) -> None:
    found = together.get(kind) or seen(kind)
    assert found["backend"] == "jax"
    assert found["torch_xla"] == []
    for client in CLIENTS:
        assert found[client] == pytest.approx(found["plain"], rel=TOLERANCE), client
    assert found["plain"][-1] < found["plain"][0] - 1


@pytest.mark.parametrize("kind", ["tensor", pytest.param("tensor, each", marks=pytest.mark.slow)])
def test_clients_count_the_replicas_of_a_mesh_whose_devices_share_weights(
    together: dict[str, Any], kind: str
) -> None:
    found = together.get(kind) or seen(kind)
    plain = found.pop("plain")
    assert len(found) == (3 if kind == "tensor, each" else 2)
    for client, runs in found.items():
        for losses in runs:
            assert losses == pytest.approx(plain, rel=TOLERANCE), client


@pytest.mark.parametrize(
    "clients",
    [
        ("accelerate",),
        pytest.param((*CLIENTS, "keyed trainer", "keyed accelerate"), marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_clients_let_devices_share_rows_by_their_own_words(
    together: dict[str, Any], clients: tuple[str, ...]
) -> None:
    found = together["long rows"]
    if len(clients) > 1:
        module = "tests.jax_backend.clients_of_long_rows"
        found = printed_by("-m", module, *clients, SPMDZERO_BACKEND="jax")
    assert found.keys() == {"plain", *clients}
    for client in clients:
        assert found[client] == pytest.approx(found["plain"], rel=TOLERANCE), client


_SCRIPT = """
import sys
from transformers import BertModel
import torch, spmdzero
spmdzero.initialize(model=torch.nn.Linear(8, 8), config={"train_batch_size": 8})
print(sys.modules.get("torch_xla") is not None)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch_xla") is None, reason="there is no torch_xla to import")
def test_transformers_imported_first_is_told_how_to_leave_torch_xla_out() -> None:
    with pytest.raises(AssertionError, match=r"transformers.*USE_TORCH_XLA=false.*install\(\)"):
        run_python("-c", _SCRIPT, devices=8, USE_TORCH_XLA="true")
    printed = run_python("-c", _SCRIPT, devices=8, USE_TORCH_XLA="false")
    assert printed.splitlines()[-1] == "False"


@pytest.mark.slow
@pytest.mark.parametrize("client", ["accelerate", "transformers"])
def test_a_client_that_was_imported_before_there_was_a_deepspeed_says_so(client: str) -> None:
    # Where there is a torch_xla, it is refused for its own backend of that.
    said = seen(client)
    assert said.startswith(f"SpmdZeroUsageError: {client} was imported before"), said
    assert "install() before" in said


@pytest.mark.slow
def test_processes_of_accelerates_launcher_train_one_model() -> None:
    order = {"optimizer": "torch", "schedule": "none", "steps": 8}
    (plain,) = loop("plain", [order], devices=1)["plain"]
    options = ("--use_deepspeed", "--zero_stage", "2", "--gradient_clipping", "1.0")
    ours = launched(*options, "--num_processes", "2", order=order | {"config": "launched"})
    for numbers in ("losses", "norms"):
        assert ours[numbers] == pytest.approx(plain[numbers], rel=TOLERANCE), numbers
