"""A module that is trained in a loop of one's own is written by whatever writes files."""

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.processes import run_python

# `make test-newest` installs none.
pytestmark = [
    pytest.mark.backends("jax", "torch_xla"),
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("transformers", "accelerate", "peft")),
        reason="the clients aren't installed",
    ),
]

SAVERS = (
    "torch.save", "safetensors.save_file", "safetensors.save_model", "save_pretrained",
    "accelerate", "hub",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Saver and stage -> what its file had."""
    # Imports of clients that have seen torch_xla belong to no other test's process.
    printed = run_python(
        "-m", "tests.integrations.saving_loop", devices=2, fresh=True, USE_TORCH_XLA="false"
    )
    return json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("saver", SAVERS)
def test_a_saver_writes_the_devices_values(found: dict[str, Any], saver: str, stage: int) -> None:
    saved = found[f"{saver}, stage {stage}"]
    assert saved["names"] == found["parameters"]
    assert saved["equal"]
    # torch.save keeps both names of a tied weight; who looks for shared memory writes one.
    assert saved["tied twice"] == (saver == "torch.save")


def test_an_adapter_is_saved_beside_an_installed_torch_xla(found: dict[str, Any]) -> None:
    assert len(found["peft"]["names"]) == 2
    assert found["peft"]["equal"]


def test_nobody_finds_torch_xla_where_jax_runs(found: dict[str, Any]) -> None:
    is_jax = found["backend"] == "jax"
    assert found["imported"] != is_jax
    assert found["found"] != is_jax
