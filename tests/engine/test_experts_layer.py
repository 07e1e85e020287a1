"""`deepspeed.moe.layer.MoE`: DeepSpeed's experts, by its numbers, at any ZeRO stage."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from spmdzero.moe.layer import MoE
from spmdzero.moe.sharded_moe import TopKGate
from spmdzero.moe.utils import (
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
)
from torch import nn

import spmdzero
from tests.oracle import experts as recorded
from tests.support import engines

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

DEVICES, STEPS = 8, 4


@pytest.mark.parametrize("name", recorded.LAYERS)
def test_outputs_losses_and_gradients_are_deepspeeds(name: str) -> None:
    known = np.load(recorded.DATA)
    made = recorded.layer(MoE, name)
    found = recorded.results(made, recorded.tokens()[0])
    assert {f"{name}/{key}" for key in found} == {k for k in known if k.startswith(f"{name}/")}
    for key, value in found.items():
        # The same operations in fp32, with sums over choices in another order.
        np.testing.assert_allclose(value, known[f"{name}/{key}"], rtol=1e-5, atol=1e-6)
    if "capacity" in str(recorded.LAYERS[name]) and name in ("two", "three"):
        gate = made.deepspeed_moe.gate
        routes = gate(recorded.tokens()[0])
        assert (routes.experts < 0).any(), "no token is dropped, so that nothing shows it"


class Net(nn.Module):
    """Two layers of experts, with their balancing losses."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.second = (recorded.layer(MoE, name) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of rows `[n, length, width]`."""
        hidden, one, _ = self.first(x)
        hidden, other, _ = self.second(torch.tanh(hidden) + x)
        return hidden.square().mean() + 0.01 * (one + other)


def rows(step: int) -> torch.Tensor:
    shape = (DEVICES, recorded.LENGTH, recorded.WIDTH)
    return torch.randn(shape, generator=torch.manual_seed(10 + step))


def expected(name: str) -> list[float]:
    """Each device's tokens meet the experts by themselves, as on each rank of DeepSpeed."""
    model, losses = Net(name), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([model(row[None]) for row in rows(step)]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def start(name: str, stage: int, **more: Any) -> spmdzero.Engine:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return engines.start(Net(name), zero_optimization=zero, gradient_clipping=0.0, **more)


@pytest.mark.parametrize(
    ("name", "stage"),
    [("one", 0), ("two", 1), ("two", 3), ("three", 2), ("residual", 3), ("one, none dropped", 2)],
)
def test_an_engine_trains_experts_as_ranks_of_one_group_each(name: str, stage: int) -> None:
    engine = start(name, stage)
    found = [engines.three_calls(engine, rows(step)).item() for step in range(STEPS)]
    # Sums of fp32 in another order, over four steps of AdamW.
    assert found == pytest.approx(expected(name), rel=1e-5)
    one_call = start(name, stage)
    assert [engines.one_call(one_call, rows(step)).item() for step in range(STEPS)] == found


@pytest.mark.parametrize(
    "layer", [{"k": 1}, {"k": 2}, {"k": 1, "noisy_gate_policy": "RSample"},
              {"k": 3, "noisy_gate_policy": "Jitter"}],
)  # fmt: skip
def test_what_is_drawn_differs_by_step_and_trains(layer: dict[str, Any]) -> None:
    class Drawn(Net):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            made = [MoE(recorded.WIDTH, recorded.Expert(), num_experts=4, **layer)] * 1
            (self.first,), self.second = made, nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output, l_aux, _ = self.first(x)
            return (output - 1).square().mean() + 0.01 * l_aux

    torch.manual_seed(0)
    engine = engines.start(Drawn(), optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    losses = [engines.three_calls(engine, rows(0)).item() for _ in range(20)]
    assert losses[-1] < losses[0]


def test_parameters_of_experts_get_groups_of_their_own() -> None:
    model = Net("two")
    assert has_moe_layers(model) == (True, recorded.EXPERTS)
    assert has_moe_layers(nn.Linear(2, 2)) == (False, 0)
    experts = [p for name, p in model.named_parameters() if "experts" in name]
    assert [p for p in model.parameters() if is_moe_param(p)] == experts
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all", "lr": 0.5}, max_group_size=2000
    )
    assert [is_moe_param_group(group) for group in groups] == [False] + [True] * (len(groups) - 1)
    assert len(groups) > 3
    assert [p for group in groups[1:] for p in group["params"]] == experts
    assert {group["name"] for group in groups[1:]} == {"ep_size_1"}
    assert {group["lr"] for group in groups} == {0.5}
    engine = spmdzero.initialize(
        model=model, model_parameters=groups, config=engines.config(gradient_clipping=0.0)
    )[0]
    engines.three_calls(engine, rows(0))
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5] * len(groups)


def test_a_group_of_experts_has_no_effect_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "spmdzero"):
        layer = MoE(16, recorded.Expert(), num_experts=4, ep_size=2)
    assert len(layer.deepspeed_moe.experts.deepspeed_experts) == 4
    assert "every device has all 4 experts for its own tokens" in caplog.text
    with pytest.raises(AssertionError, match="should be divisible by expert parallel size"):
        MoE(16, recorded.Expert(), num_experts=4, ep_size=3)
    with pytest.raises(AssertionError, match="Unsupported noisy_gate_policy"):
        MoE(16, recorded.Expert(), noisy_gate_policy="Noise")


def test_places_are_counted_in_fp32_as_deepspeeds() -> None:
    gate = TopKGate(8, 10, k=1, capacity_factor=1.1, min_capacity=0, use_rts=False)
    # 1.1 * 10 is 11.000000000000002 in fp64, and 11 in fp32.
    assert gate(torch.randn(100, 8)).capacity == 11
