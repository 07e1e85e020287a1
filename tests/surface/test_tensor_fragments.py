"""A parameter's weights, states and gradient, set as a whole and held by the devices in shards."""

from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero import utils
from tests.support import engines

WIDTH, STATES = 64, ("exp_avg", "exp_avg_sq")
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {"bf16": {"enabled": True}}),
    # Gradients wait in fp16, times the loss scale: a power of two rounds none of their digits.
    "fp16": (torch.float16, {"fp16": {"enabled": True, "loss_scale": 256}}),
}


class Blocks(nn.Module):
    """A frozen layer, two whose matrices every device has an eighth of, and an odd shape, which
    is flattened and padded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.first = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.odd, self.last = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(torch.tanh(self.frozen(x))))
        return self.last(self.odd(hidden)).float().pow(2).mean()


def start(stage: int, gas: int, **more: Any) -> spmdzero.Engine:
    return engines.start(
        Blocks(),
        zero_optimization={"stage": stage},
        gradient_accumulation_steps=gas,
        spmd={"min_shard_elements": 256},
        **more,
    )


def values(engine: spmdzero.Engine, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A random tensor for each trained parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(parameter.shape, generator=generator).to(dtype)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def held(engine: spmdzero.Engine, name: str, shape: torch.Size) -> torch.Tensor:
    """A state put together from what each device holds of it."""
    stored = engine.named_tensors()[name]
    whole = torch.full(stored.shape, torch.nan)
    parts = spmdzero.shards(stored).shards
    for part, values in zip(parts, spmdzero.local_shards(stored), strict=True):
        whole[part.slices] = values.float()
    assert not whole.isnan().any()
    return whole.reshape(-1)[: shape.numel()].reshape(shape)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("stage", "gas"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)]
)
def test_what_is_set_in_full_is_read_back_and_is_in_the_devices_shards(
    stage: int, gas: int, precision: str
) -> None:
    dtype, more = PRECISIONS[precision]
    engine = start(stage, gas, **more)
    x = torch.rand(8, WIDTH).to(dtype)
    parameters = dict(engine.module.named_parameters())
    for step in range(2):
        for _ in range(gas - 1):
            engine.backward(engine(x))
            engine.step()
        engine.backward(engine(x))
        grads = values(engine, step, dtype)
        masters = values(engine, 10 + step, torch.float32)
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                read = (utils.safe_get_full_fp32_param, utils.safe_get_full_grad)
                assert [get(parameter) for get in read] == [None, None]
                continue
            utils.safe_set_full_grad(parameter, grads[name])
            utils.safe_set_full_fp32_param(parameter, masters[name])
        for name, value in grads.items():
            found = utils.safe_get_full_grad(parameters[name])
            # fp16 reads them in fp32, without the loss scale.
            assert found.dtype == (torch.float32 if precision == "fp16" else dtype)
            assert torch.equal(found.cpu(), value.to(found.dtype)), name
        assert_masters(engine, masters, master=precision != "fp32")
        engine.step()

        for slot in STATES:
            for name, value in values(engine, 20, torch.float32).items():
                utils.safe_set_full_optimizer_state(parameters[name], value, slot)
                found = utils.safe_get_full_optimizer_state(parameters[name], slot)
                assert torch.equal(found.cpu(), value), (name, slot)
                assert torch.equal(held(engine, f"{slot}/{name}", value.shape), value), name
        assert utils.safe_get_full_optimizer_state(parameters["frozen.weight"], "exp_avg") is None


def assert_masters(
    engine: spmdzero.Engine, expected: dict[str, torch.Tensor], *, master: bool
) -> None:
    """The weights are these, in full, on the devices, and in the module rounded to its dtype."""
    for name, value in expected.items():
        parameter = engine.module.get_parameter(name)
        assert torch.equal(utils.safe_get_full_fp32_param(parameter).cpu(), value), name
        assert torch.equal(parameter.detach().cpu(), value.to(parameter.dtype)), name
        if master:
            assert torch.equal(held(engine, f"master/{name}", value.shape), value), name


def test_each_device_holds_an_eighth_of_what_is_set() -> None:
    engine = start(2, 2)
    weight = engine.module.first.weight
    value = torch.arange(float(WIDTH * WIDTH)).reshape(WIDTH, WIDTH)
    utils.safe_set_full_optimizer_state(weight, value, "exp_avg")
    # In the middle of an accumulation the gradient is a shard too.
    engine.backward(engine(torch.rand(8, WIDTH)))
    engine.step()
    utils.safe_set_full_grad(weight, value)
    for name in ("exp_avg/first.weight", "accumulator/first.weight"):
        stored = engine.named_tensors()[name]
        for part, found in zip(
            spmdzero.shards(stored).shards, spmdzero.local_shards(stored), strict=True
        ):
            assert found.numel() == WIDTH * WIDTH // 8, name
            assert torch.equal(found, value[part.slices]), name


def test_gradients_are_updated_one_after_the_other_from_what_they_are() -> None:
    engine = start(2, 1, bf16={"enabled": True})
    engine.backward(engine(torch.rand(8, WIDTH).bfloat16()))
    parameters = list(engine.module.parameters())
    before = {p: g.cpu() for p in parameters if (g := utils.safe_get_full_grad(p)) is not None}
    asked = []

    def twice(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        asked.append(parameter)
        return grad * 2

    utils.safe_update_full_grad_vectorized(parameters, twice)
    assert len(asked) == len(before) == 6
    for parameter, grad in before.items():
        assert torch.equal(utils.safe_get_full_grad(parameter).cpu(), grad * 2)
