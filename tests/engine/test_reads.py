"""Python that reads a replica's tensor gets a value or an error in words, never a dead process."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from spmdzero.backend import counters, current, runtime
from spmdzero.errors import ReplicaRegionError
from tests.support.engines import Mean, one_call, start, three_calls
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

# What torch refuses of every XLA tensor, in its own words.
FOREIGN = {"asarray", "dlpack", "storage", "untyped_storage"}
# An output that is a scalar has no rows.
SCALAR = {"slice", "len", "empty"}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, str]]:
    """place -> read -> what came of it; see `every_read.py`."""
    return json.loads(run_python("-m", "tests.engine.every_read", devices=2).splitlines()[-1])


def test_no_read_anywhere_in_a_users_code_ends_the_process(
    found: dict[str, dict[str, str]],
) -> None:
    assert found.pop("end")
    assert len(found) == 35
    for place, reads in found.items():
        for name, outcome in reads.items():
            is_fine = name == "repr" or outcome == "value" or name in FOREIGN
            is_scalar = place.endswith("output") and name in SCALAR
            assert is_fine or is_scalar or outcome.startswith("ReplicaRegionError: "), (place, name)


def test_repr_shows_every_replicas_values_wherever_they_differ(
    found: dict[str, dict[str, str]],
) -> None:
    found.pop("end", None)
    for place, reads in found.items():
        if place in ("parameter", "the same on all") or place.endswith("output"):
            assert "replica" not in reads["repr"], place
        else:
            assert reads["repr"].startswith("tensor of 2 replicas, another on each (shape="), place
            assert "replica 0: tensor(" in reads["repr"], place
            assert "replica 1: tensor(" in reads["repr"], place


class Talkative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        heard.append(f"{y.mean()}")
        return y.square().mean()


heard: list[str] = []


def test_what_forward_prints_of_a_tensor_is_printed_at_each_step() -> None:
    # With other numbers Adam's steps may leave the mean where it is, to four digits.
    torch.manual_seed(1)
    engine = start(Talkative())
    x = torch.randn(engine.mesh.size, 4)
    steps = 6
    for run_step in (one_call, three_calls):
        heard.clear()
        for _ in range(steps):
            run_step(engine, x)
        # Each step's own values: the parameters have moved.
        assert len(set(heard)) == steps
        assert all(text.count("\n  replica ") == 8 for text in heard)
    if current().compiler is not None:
        assert "reads a value from the devices" in str(engine.capture.reason)


def test_a_loss_with_what_a_hook_kept_is_refused_and_the_next_step_trains() -> None:
    engine = start(Talkative())
    kept: list[torch.Tensor] = []
    hook = engine.module.layer.register_forward_hook(lambda _, args, out: kept.append(out))
    x = torch.randn(engine.mesh.size, 4)
    loss = engine(x) * 2
    total = loss + kept[0].mean()
    with pytest.raises(ReplicaRegionError, match=r"kept from inside.*Return it from forward"):
        engine.backward(total)
    hook.remove()
    three_calls(engine, x)
    assert engine.global_steps == 1
    assert total.isnan()


@pytest.mark.parametrize("called", [lambda engine: engine, lambda engine: engine.module])
def test_evaluation_outputs_that_nobody_reads_add_up_to_no_larger_program(called: Any) -> None:
    engine = start(Mean())
    engine.eval()
    rows = torch.ones(engine.dp_world_size, 4)
    programs = []
    with torch.no_grad():
        for count in (2, 8):
            before = counters.compiled()[0]
            kept = [called(engine)((rows * place).to(engine.device)) for place in range(count)]
            assert kept[-1].isfinite().item()
            # As the next step does.
            runtime.sync()
            programs.append(counters.compiled()[0] - before)
    assert programs[1] == 0, programs
