"""Each tensor of a model that is loaded after a client has read its arguments is transformers'."""

import itertools
import json
from pathlib import Path

import pytest

from tests.integrations.loaded_models import CLIENTS, ORDERS
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("jax")

ROWS = [
    pytest.param(
        client, stage, order,
        # One of the two orders in which the dearest defects were found, the other at a time.
        marks=() if (client, stage, order) in {("trainer", 2, ORDERS[2])} else pytest.mark.slow,
    )
    for client, stage, order in itertools.product(CLIENTS, range(4), ORDERS)
]  # fmt: skip


@pytest.mark.parametrize(("client", "stage", "order"), ROWS)
def test_each_tensor_of_a_loaded_model_is_that_of_plain_transformers(
    client: str, stage: int, order: str, tmp_path: Path
) -> None:
    # A process of its own: torch fills tables of its functions once.
    module = ("-m", "tests.integrations.loaded_models")
    said = run_python(*module, client, str(stage), order, str(tmp_path), devices=2, fresh=True)
    assert json.loads(said.splitlines()[-1]) == {}
