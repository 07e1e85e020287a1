"""The training state: one name for each tensor, one place where it is kept."""

import pytest
import torch
from torch import nn

import spmdzero
from tests.support import engines

pytestmark = pytest.mark.backends("any")


class Counting(nn.Module):
    """Ties two weights, counts its calls, and has a parameter of the name of a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.applied = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        x = x.to(self.applied.dtype)
        for layer in self.layers:
            x = layer(x)
        return (x * self.applied).float().square().mean()


def trained() -> spmdzero.Engine:
    engine = engines.start(
        Counting(),
        gradient_accumulation_steps=2,
        bf16={"enabled": True},
        spmd={"check_finite": True, "min_shard_elements": 16},
    )
    engines.one_call(engine, torch.ones(8, 8), torch.ones(8, 8))
    return engine


def test_a_name_leads_to_the_place_where_the_state_lists_it() -> None:
    state = trained()._training.state
    places = {place.name: place for place in state.places()}
    roles = {"parameter", "accumulator", "master", "exp_avg", "exp_avg_sq"}
    names = {f"{role}/{name}" for role in roles for name in state.parameters}
    names |= {"buffer/calls", "counter/applied", "counter/skipped", "norm"}
    names |= {"first_bad", "finite", "loss"}
    assert {name for name in places if not name.startswith("agreement/")} == names
    assert any(name.startswith("agreement/") for name in places)
    assert "parameter/layers.2.weight" not in places
    for name, listed in places.items():
        found = state.place(name)
        assert found.registry is listed.registry, name
        assert (found.key, found.spec, found.replaced) == (listed.key, listed.spec, listed.replaced)
        assert state[name] is listed.tensor


def test_a_write_keeps_the_tensor_that_others_hold_but_of_what_a_step_replaces() -> None:
    state = trained()._training.state
    for name, place in {place.name: place for place in state.places()}.items():
        held, value = state[name], torch.full_like(state[name].detach(), 1)
        with torch.no_grad():
            state.write(name, value)
        assert (state[name] is held) != place.replaced, name
        assert (state[name] == 1).all().item(), name


def test_what_is_no_state_has_no_name() -> None:
    state = trained()._training.state
    for name in ("parameter/none", "parameter/no.such", "exp_avg/none", "other/applied", "none"):
        assert name not in state, name
    state.slots.clear()
    for name in ("exp_avg/applied", "parameter/none"):
        with pytest.raises(KeyError):
            state.write(name, torch.zeros(8))
