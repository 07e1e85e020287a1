"""`zero_quantized_gradients`: gradients that cross in int8 at stage 3, ZeRO++'s qgZ."""

from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.compat.tensor_fragment import safe_get_full_grad
from spmdzero.inspect import CollectiveLedger
from tests.engine.test_stage_3 import ALL, Tied, batches
from tests.support import engines

pytestmark = pytest.mark.backends("jax")

DEVICES = 8
QUANTIZED = {**ALL, "zero_quantized_gradients": True}


class Net(nn.Module):
    """A weight that is split by rows, one by columns, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Linear(128, 64)
        self.columns = nn.Linear(64, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of rows `[n, 128]`."""
        return self.columns(torch.tanh(self.rows(x))).square().mean()


SPLIT = {"rows.weight": 0, "columns.weight": 1}


def rows(step: int = 0) -> torch.Tensor:
    return torch.randn(DEVICES, 128, generator=torch.manual_seed(step))


def start(model: nn.Module, zero: dict[str, Any], **more: Any) -> spmdzero.Engine:
    spmd = {"min_shard_elements": 0, **more.pop("spmd", {})}
    return engines.start(model, zero_optimization=zero, spmd=spmd, gradient_clipping=0.0, **more)


def cast(part: torch.Tensor) -> torch.Tensor:
    """What int8 leaves of a part, with a scale for each row."""
    scale = part.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (part / scale.clamp(min=1e-30)).round() * scale, 0.0)


def expected() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The mean gradient of 8 rows: as the sum of what int8 leaves of each device's, and exactly."""
    model, batch = Net(), rows()
    sums: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for row in batch:
        model.zero_grad()
        model(row[None]).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            own = parameter.grad / DEVICES
            exact[name] = exact.get(name, 0) + own
            if name in SPLIT:
                parts = own.chunk(DEVICES, dim=SPLIT[name])
                own = torch.cat([cast(part) for part in parts], dim=SPLIT[name])
            sums[name] = sums.get(name, 0) + own
    return sums, exact


@pytest.mark.parametrize("reduction", ["auto", "explicit"])
def test_a_gradient_is_the_sum_of_what_int8_leaves_of_each_devices(reduction: str) -> None:
    engine = start(Net(), QUANTIZED, spmd={"reduction": reduction})
    engine.backward(engine(rows()))
    wanted, exact = expected()
    for name, parameter in engine.module.named_parameters():
        found = safe_get_full_grad(parameter).cpu()
        # Eight summands of fp32 in another order; a number at the middle between two of int8's may
        # become the other one, which hardly any is.
        close = torch.isclose(found, wanted[name], rtol=1e-5, atol=1e-6 * exact[name].abs().max())
        assert close.float().mean() > 0.995, name
        assert torch.equal(found, exact[name]) is False
        off = (found - exact[name]).abs().max() / exact[name].abs().max()
        # Half a step of 1/127 of a row's largest, of each device's gradient.
        assert (1e-5 if name in SPLIT else 0) <= off < 0.02, name


def dtypes(zero: dict[str, Any], **more: Any) -> set[tuple[str, str, bool]]:
    """Kind and dtype of what the gradients of matrices send, and whether it is a scale."""
    engine = start(Tied(), zero, bf16={"enabled": True}, **more)
    texts: list[str] = []
    with engine.observe(lambda graph: texts.append(graph.hlo())):
        engines.one_call(engine, batches(1, length=4)[0])
    found = CollectiveLedger.from_hlo(*texts).of_role("gradient")
    return {(c.kind, c.dtype, 1 in c.shape[-1:]) for c in found if len(c.shape) > 1}


def test_the_wire_has_int8_for_gradients_and_their_scales() -> None:
    found = dtypes(QUANTIZED)
    assert ("all-to-all", "s8", False) in found
    assert {kind for kind, _, _ in found} == {"all-to-all"}
    assert "s8" not in {dtype for _, dtype, _ in dtypes(ALL)}


@pytest.mark.parametrize(
    "more",
    [
        {"spmd": {"scan": "on"}},
        {"gradient_accumulation_steps": 2},
        {"zero": {"zero_hpz_partition_size": 4, "zero_quantized_weights": True}},
    ],
)
def test_training_is_that_of_whole_gradients_within_what_int8_loses(more: dict[str, Any]) -> None:
    more = dict(more)
    zero = {**QUANTIZED, **more.pop("zero", {})}
    found = []
    for own in (zero, ALL):
        torch.manual_seed(0)
        engine = start(Tied(), own, **more)
        micro = more.get("gradient_accumulation_steps", 1)
        steps = [batches(micro * 4)[step * micro : (step + 1) * micro] for step in range(4)]
        found.append([engines.one_call(engine, *batch).item() for batch in steps])
    quantized, plain = found
    assert quantized != plain
    assert quantized == pytest.approx(plain, rel=0.02)


def test_below_stage_3_gradients_are_summed_in_full(caplog: pytest.LogCaptureFixture) -> None:
    losses = []
    for zero in ({"stage": 2}, {"stage": 2, "zero_quantized_gradients": True}):
        engine = start(Net(), zero)
        losses.append([engines.three_calls(engine, rows(step)).item() for step in range(3)])
    assert losses[0] == losses[1]
    assert "zero_quantized_gradients has no effect below stage 3" in caplog.text
    assert engine.zero_quantized_gradients()
