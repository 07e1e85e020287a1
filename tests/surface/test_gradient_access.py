"""`param.grad` after backward is the averaged full gradient, and what is written to it counts."""

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.backend import counters
from tests.support.selected import outside

ROWS, WIDTH = 16, 12


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 10), nn.Linear(10, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(x))).squeeze(-1), y)


def make_model() -> Regression:
    torch.manual_seed(0)
    return Regression()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, 3 * x.sum(1)


def engine_of(model: nn.Module, *, stage: int, gas: int, **more: Any) -> spmdzero.Engine:
    config = {
        "train_micro_batch_size_per_gpu": ROWS // 8,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        # first.weight is a shard, the biases are flat or whole: every kind of placement.
        "spmd": {"min_shard_elements": 16},
    }
    return spmdzero.initialize(model=model, config=config | more)[0]


def torch_grads(model: nn.Module, micros: list[int]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for micro in micros:
        (model(*batch(micro)) / len(micros)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def grads(engine: spmdzero.Engine) -> dict[str, torch.Tensor]:
    return {n: p.grad.cpu() for n, p in engine.module.named_parameters() if p.grad is not None}


# fp32 sums over the batch in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
CASES = [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)]
# What is summed on each device, whole and in parts, and what is reduced at once.
QUICK = [(0, 1), (1, 2), (2, 1)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=f"stage{case[0]}-gas{case[1]}", marks=outside(QUICK, case))
        for case in CASES
    ],
)
def trained(request: pytest.FixtureRequest) -> tuple[spmdzero.Engine, int]:
    stage, gas = request.param
    return engine_of(make_model(), stage=stage, gas=gas), gas


def run_micros(engine: spmdzero.Engine, gas: int, first: int = 0) -> None:
    """All micro-batches of a step but for the last `step`."""
    for micro in range(first, first + gas):
        engine.backward(engine(*batch(micro)))
        if micro < first + gas - 1:
            engine.step()


def snapshot(engine: spmdzero.Engine) -> Regression:
    plain = make_model()
    plain.load_state_dict({k: v.cpu() for k, v in engine.module.state_dict().items()})
    return plain


class TestReading:
    def test_grad_is_none_before_backward_and_after_the_step(self, trained) -> None:
        engine, gas = trained
        assert grads(engine) == {}
        run_micros(engine, gas)
        engine.step()
        assert grads(engine) == {}

    def test_grad_is_the_mean_over_devices_and_micro_batches(self, trained) -> None:
        engine, gas = trained
        expected = torch_grads(snapshot(engine), list(range(gas)))
        run_micros(engine, gas)
        found = grads(engine)
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], **CLOSE)
        engine.step()

    def test_reading_changes_no_number_of_the_step(self, trained) -> None:
        engine, gas = trained
        before = copy.deepcopy(engine.module.state_dict())
        run_micros(engine, gas)
        engine.step()
        unread = {k: v.cpu() for k, v in engine.module.state_dict().items()}
        engine.module.load_state_dict(before)
        run_micros(engine, gas)
        grads(engine)
        engine.step()
        for name, value in engine.module.state_dict().items():
            assert torch.equal(value.cpu(), unread[name]), name

    def test_a_parameter_that_is_not_read_compiles_nothing(self, trained) -> None:
        engine, gas = trained
        for _ in range(2):
            run_micros(engine, gas)
            engine.step()
        compiled = counters.compiled()[0]
        run_micros(engine, gas)
        engine.step()
        assert counters.compiled()[0] == compiled


class TestWriting:
    def test_torchs_clip_grad_norm_clips_what_the_step_uses(self, trained) -> None:
        engine, gas = trained
        plain = snapshot(engine)
        torch_grads(plain, list(range(gas)))
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        run_micros(engine, gas)
        norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.01)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
        assert expected.item() > 0.02, "or clipping would do nothing"
        engine.step()
        for name, value in engine.module.state_dict().items():
            torch.testing.assert_close(value.cpu(), plain.state_dict()[name], **CLOSE)

    @pytest.mark.parametrize("way", ["in place", "data", "assign"])
    def test_a_written_gradient_is_the_one_that_is_used(self, trained, way: str) -> None:
        engine, gas = trained
        plain = snapshot(engine)
        torch_grads(plain, list(range(gas)))
        run_micros(engine, gas)
        for parameter in (*plain.parameters(), *engine.module.parameters()):
            if way == "in place":
                parameter.grad.mul_(0.5)
            elif way == "data":
                parameter.grad.data.mul_(0.5)
            else:
                parameter.grad = parameter.grad * 0.5
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        engine.step()
        for name, value in engine.module.state_dict().items():
            torch.testing.assert_close(value.cpu(), plain.state_dict()[name], **CLOSE)

    def test_none_forgets_one_parameters_gradient(self, trained) -> None:
        engine, gas = trained
        before = {k: v.cpu() for k, v in engine.module.state_dict().items()}
        run_micros(engine, gas)
        engine.module.first.weight.grad = None
        assert engine.module.first.weight.grad is None
        engine.step()
        after = {k: v.cpu() for k, v in engine.module.state_dict().items()}
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == before.keys() - {"first.weight"}

    def test_zero_grad_of_the_module_forgets_all(self, trained) -> None:
        engine, gas = trained
        run_micros(engine, gas)
        engine.module.zero_grad()
        assert grads(engine) == {}
        engine.step()

    def test_another_shape_is_refused(self, trained) -> None:
        engine, _ = trained
        with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"second.bias.grad has shape \[1\]"):
            engine.module.second.bias.grad = torch.zeros(3)


def test_a_second_backward_adds_to_a_gradient_that_was_written() -> None:
    engine = engine_of(make_model(), stage=2, gas=1)
    plain = snapshot(engine)
    for module, run in (
        (plain, lambda: plain(*batch(0)).backward()),
        (engine.module, lambda: engine.backward(engine(*batch(0)))),
    ):
        run()
        for parameter in module.parameters():
            parameter.grad.mul_(10)
        run()
    for name, grad in grads(engine).items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad, **CLOSE)


def test_bf16_gradients_read_in_the_dtype_of_accumulation() -> None:
    for more, dtype in (({}, torch.bfloat16), ({"grad_accum_dtype": "fp32"}, torch.float32)):
        engine = engine_of(make_model(), stage=2, gas=1, bf16={"enabled": True}, data_types=more)
        x, y = batch(0)
        engine.backward(engine(x.bfloat16(), y.bfloat16()))
        assert engine.module.first.weight.grad.dtype == dtype


@pytest.mark.parametrize("gas", [1, 2])
def test_fp16_gradients_are_read_and_written_without_the_loss_scale(gas: int) -> None:
    # A scale that is no power of two: reading must not round it into the gradient.
    fp16 = {"enabled": True, "loss_scale": 1000}
    engine = engine_of(make_model(), stage=2, gas=gas, fp16=fp16)
    plain = make_model()
    torch_grads(plain, list(range(gas)))
    for micro in range(gas):
        engine.backward(engine(*(t.half() for t in batch(micro))))
        if micro < gas - 1:
            engine.step()
    for name, grad in grads(engine).items():
        assert grad.dtype == torch.float32
        # fp16 forward and backward beside fp32.
        torch.testing.assert_close(grad, plain.get_parameter(name).grad, rtol=2e-2, atol=2e-2)
    weight = engine.module.first.weight
    before = weight.detach().float().cpu()
    weight.grad = torch.full((10, WIDTH), 2.0)
    engine.step()
    # SGD with lr 0.1; parameters are fp16.
    torch.testing.assert_close(weight.detach().float().cpu(), before - 0.2, rtol=0, atol=1e-3)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
def test_gradients_that_no_sync_held_back_are_read_too(inside: bool) -> None:
    engine = engine_of(make_model(), stage=1, gas=1)
    expected = torch_grads(snapshot(engine), [0])
    with engine.no_sync():
        engine.backward(engine(*batch(0)))
        found = grads(engine) if inside else {}
    found = found or grads(engine)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], **CLOSE)
    engine.backward(engine(*batch(0)))
    for name, grad in grads(engine).items():
        torch.testing.assert_close(grad, 2 * expected[name], **CLOSE)


def test_an_assigned_gradient_replaces_what_no_sync_held_back() -> None:
    engine = engine_of(make_model(), stage=1, gas=1)
    weight = engine.module.first.weight
    with engine.no_sync():
        engine.backward(engine(*batch(0)))
    weight.grad = torch.ones(10, WIDTH)
    assert torch.equal(weight.grad.cpu(), torch.ones(10, WIDTH))


def test_copies_and_pickles_of_a_trained_module_are_plain_torch() -> None:
    engine = engine_of(make_model(), stage=2, gas=1)
    engine.backward(engine(*batch(0)))
    duplicate = copy.deepcopy(engine.module)
    file = io.BytesIO()
    torch.save(engine.module, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False, map_location="cpu")
    for module in (duplicate, loaded):
        for name, parameter in module.named_parameters():
            plain = nn.Parameter(torch.empty(0, device=parameter.device))
            assert type(parameter) is type(plain)
            assert parameter.grad is None
            assert torch.equal(parameter.cpu(), engine.module.get_parameter(name).cpu())


def test_a_module_that_outlives_its_engine_keeps_no_optimizer_states() -> None:
    model = make_model()
    engine = engine_of(model, stage=2, gas=1, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
    engine.train_batch(batch(0))
    state = weakref.ref(engine.named_tensors()["exp_avg/first.weight"])
    assert state() is not None
    del engine
    gc.collect()
    assert state() is None
    model.load_state_dict(make_model().state_dict())
    assert torch.equal(model.first.weight.detach().cpu(), make_model().first.weight)


def test_parameters_outlive_their_engine() -> None:
    model = make_model()
    engine = engine_of(model, stage=2, gas=1)
    del engine
    assert model.first.weight.grad is None
    (model.first.weight.sum() * 2).backward()
    assert model.first.weight.grad is not None
    assert torch.equal(model.first.weight.grad.cpu(), torch.full((10, WIDTH), 2.0))
