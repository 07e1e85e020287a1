"""Optimizers, schedules and parameter groups that users bring."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from tests.engine.regression import CLOSE, ROWS, WIDTH, batch, config, make_model, reference
from tests.support.engines import assert_trained_as, one_call, three_calls

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")


def train(engine: spmdzero.Engine, steps: int = 6) -> list[float]:
    return [three_calls(engine, batch(step)).item() for step in range(steps)]


def test_a_torch_optimizer_is_taken_over_with_its_groups_and_schedule() -> None:
    def build(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        groups = [
            {"params": list(model.body.parameters()), "lr": 3e-3},
            {"params": list(model.head.parameters()), "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    model, ours = make_model(), make_model()
    optimizer, schedule = build(model)
    expected = reference(optimizer, model, schedule=schedule)
    mine, my_schedule = build(ours)
    engine, zero, _, returned = spmdzero.initialize(
        model=ours, optimizer=mine, lr_scheduler=my_schedule, config=config()
    )
    assert returned is my_schedule
    assert isinstance(zero, torch.optim.Optimizer)
    assert train(engine) == pytest.approx(expected, **CLOSE)
    assert engine.get_lr() == [group["lr"] for group in optimizer.param_groups]


def test_groups_without_parameters_keep_their_place_in_schedules_and_checkpoints(
    tmp_path: Path,
) -> None:
    def build(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        groups: list[dict[str, Any]] = [
            {"params": [], "lr": 0.5},
            {"params": list(model.body.parameters()), "lr": 3e-3},
            {"params": [], "lr": 0.25, "betas": (0.5, 0.5)},
            {"params": list(model.head.parameters()), "lr": 1e-2},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        factors: list[Any] = [lambda t, k=k: 1 / (k + t) for k in range(1, 5)]
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factors)

    def start() -> spmdzero.Engine:
        model = make_model()
        optimizer, schedule = build(model)
        return spmdzero.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=config()
        )[0]

    model = make_model()
    optimizer, schedule = build(model)
    expected = reference(optimizer, model, schedule=schedule, steps=4)
    engine = start()
    losses = train(engine, 2)
    engine.save_checkpoint(tmp_path)
    engine.save_deepspeed_checkpoint(tmp_path / "deepspeed", universal=False)
    losses += [three_calls(engine, batch(step)).item() for step in (2, 3)]
    assert losses == pytest.approx(expected, **CLOSE)
    assert engine.get_lr() == [group["lr"] for group in optimizer.param_groups]
    for folder in (tmp_path, tmp_path / "deepspeed"):
        resumed = start()
        resumed.load_checkpoint(folder)
        again = [three_calls(resumed, batch(step)).item() for step in (2, 3)]
        assert again == pytest.approx(expected[2:], **CLOSE)
        assert resumed.get_lr() == engine.get_lr()


def test_an_optimizer_without_any_parameter_is_refused() -> None:
    optimizer = torch.optim.AdamW([{"params": []}])
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="nothing to train"):
        spmdzero.initialize(model=make_model(), optimizer=optimizer, config=config())
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="nothing to train"):
        spmdzero.initialize(model=make_model(), model_parameters=[{"params": []}], config=config())


def test_callables_make_optimizer_and_schedule() -> None:
    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)

    def make_schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    model = make_model()
    optimizer = make_optimizer(model.parameters())
    expected = reference(optimizer, model, schedule=make_schedule(optimizer))
    engine, *_ = spmdzero.initialize(
        model=make_model(), optimizer=make_optimizer, lr_scheduler=make_schedule, config=config()
    )
    assert train(engine) == pytest.approx(expected, **CLOSE)


def test_model_parameters_choose_groups_for_the_config_optimizer() -> None:
    ours, model = make_model(), make_model()
    engine, optimizer, *_ = spmdzero.initialize(
        model=ours,
        model_parameters=[{"params": ours.head.parameters(), "weight_decay": 0.0, "lr": 2e-2}],
        config=config(gradient_clipping=0.0),
    )
    plain = torch.optim.AdamW(model.head.parameters(), lr=2e-2, weight_decay=0.0)
    expected = reference(plain, model, steps=4, clip=float("inf"))
    body = engine.module.body[0].weight.cpu().clone()
    assert train(engine, 4) == pytest.approx(expected, **CLOSE)
    assert torch.equal(engine.module.body[0].weight.cpu(), body)
    assert len(optimizer.state) == 2


def test_what_is_loaded_after_initialize_stays_in_bf16_too() -> None:
    still = {"type": "SGD", "params": {"lr": 0.0}}
    engine, optimizer, *_ = spmdzero.initialize(
        model=make_model(), config=config(bf16={"enabled": True}, optimizer=still)
    )
    loaded = {name: torch.full_like(p, 0.25) for name, p in make_model().state_dict().items()}
    engine.module.load_state_dict(loaded)
    x, y = batch(0)
    three_calls(engine, (x.bfloat16(), y))
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.cpu().float(), loaded[name]), name
        master = optimizer.state[parameter]["master"]
        assert (master.cpu() == 0.25).sum() == parameter.numel()


def test_attributes_of_parameters_survive_the_move() -> None:
    model = make_model()
    for name, parameter in model.named_parameters():
        parameter.no_decay = name.endswith("bias")

    def build(parameters: Any) -> torch.optim.Optimizer:
        chosen = list(parameters)
        groups = [[p for p in chosen if p.no_decay is kept] for kept in (True, False)]
        return torch.optim.SGD(
            [{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}], lr=0.1
        )

    _, optimizer, *_ = spmdzero.initialize(
        model=model, optimizer=build, model_parameters=model.parameters(), config=config()
    )
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 3]


def test_the_passed_schedule_wins_over_the_config_as_in_deepspeed() -> None:
    engine, *_ = spmdzero.initialize(
        model=make_model(),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=0.5),
        config=config(scheduler={"type": "WarmupLR", "params": {}}),
    )
    assert engine.get_lr() == [0.005]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x * self.frozen).tanh()).pow(2).mean()


@pytest.mark.parametrize("named", [True, False], ids=["the config's", "a callable's"])
def test_torch_does_not_warn_of_a_schedule_that_follows_a_replayed_step(named: bool) -> None:
    # Warnings are errors in tests.
    step = {"scheduler": {"type": "StepLR", "params": {"step_size": 1}}} if named else {}
    engine = spmdzero.initialize(
        model=make_model(),
        lr_scheduler=None if named else lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
        config=config(**step),
    )[0]
    for number in range(2):
        one_call(engine, batch(number))
    # Twice a tenth of the config's 0.01.
    assert engine.get_lr() == pytest.approx([1e-4])


def test_tied_and_frozen_and_unused_parameters() -> None:
    decay = {"type": "SGD", "params": {"lr": 0.5, "weight_decay": 0.1}}
    engine, *_ = spmdzero.initialize(
        model=Tied(), config=config(gradient_clipping=0.0, optimizer=decay)
    )
    plain = Tied()
    sgd = torch.optim.SGD([plain.a.weight, plain.unused], lr=0.5, weight_decay=0.1)
    for step in range(3):
        x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
        three_calls(engine, x)
        sgd.zero_grad()
        plain(x).backward()
        # DeepSpeed's ZeRO gives an unused parameter a zero gradient: weight decay moves it.
        plain.unused.grad = torch.zeros(8)
        sgd.step()
    assert engine.module.a.weight is engine.module.b.weight
    assert_trained_as(engine, plain)


def test_a_model_whose_weights_have_weak_references_trains() -> None:
    """nn.LSTM: its parameters become new objects, which the user's optimizer must learn."""

    def build() -> nn.LSTM:
        torch.manual_seed(0)
        return nn.LSTM(WIDTH, 4, batch_first=True)

    plain, ours = build(), build()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.5)
    engine, *_ = spmdzero.initialize(
        model=ours,
        optimizer=torch.optim.SGD(ours.parameters(), lr=0.5),
        config=config(gradient_clipping=0.0, spmd={"outputs": {"1.0": "stack", "1.1": "stack"}}),
    )
    for step in range(2):
        x = batch(step)[0].unsqueeze(1).expand(-1, 3, -1).contiguous()
        engine.backward(engine(x)[0].pow(2).mean())
        engine.step()
        sgd.zero_grad()
        plain(x)[0].pow(2).mean().backward()
        sgd.step()
    assert_trained_as(engine, plain)


class _FromTheStart(torch.optim.Optimizer):
    """timm's MADGRAD and Adan in one: a copy of the parameter, a count in its group, `math`."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["start"] = 0, p.clone()
                    state["sum"], state["before"] = torch.zeros_like(p), -p.grad.clone()
                state["step"] += 1
                state["before"].add_(p.grad)
                rate = group["lr"] * math.sqrt(state["step"])
                state["sum"].add_(p.grad, alpha=rate).add_(state["before"], alpha=rate / 2)
                corrected = state["start"] - state["sum"] / (1 - 0.9 ** group["step"])
                p.mul_(0.1).add_(corrected, alpha=0.9)
                state["before"].copy_(p.grad).neg_()


@pytest.mark.parametrize("run", [three_calls, one_call])
def test_an_optimizer_of_pythons_numbers_is_run_on_shards_and_a_skipped_step_is_none(
    run: Any, tmp_path: Path
) -> None:
    def start() -> spmdzero.Engine:
        model = make_model()
        return spmdzero.initialize(
            model=model,
            optimizer=_FromTheStart(model.parameters()),
            config=config() | {"zero_allow_untested_optimizer": True},
        )[0]

    model = make_model()
    expected = reference(_FromTheStart(model.parameters()), model)
    engine = start()
    losses = [run(engine, batch(step)).item() for step in range(3)]
    x, y = batch(3)
    run(engine, (x * torch.nan, y))
    assert engine.skipped_steps == 1
    engine.save_checkpoint(tmp_path)
    losses += [run(engine, batch(step)).item() for step in range(3, 6)]
    assert losses == pytest.approx(expected, **CLOSE)
    assert_trained_as(engine, model)
    resumed = start()
    resumed.load_checkpoint(tmp_path)
    again = [run(resumed, batch(step)).item() for step in range(3, 6)]
    assert again == pytest.approx(expected[3:], **CLOSE)
