"""The engine's two styles, optimizers that users bring, schedules, inputs and outputs."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.backend.torch_xla import runtime

ROWS, WIDTH = 16, 12


class Regression(nn.Module):
    """Returns its loss when it gets a target, its prediction otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 24), nn.LayerNorm(24), nn.Tanh())
        self.head = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        prediction = self.head(self.body(x)).squeeze(-1)
        return prediction if y is None else F.mse_loss(prediction, y)


def make_model() -> Regression:
    torch.manual_seed(0)
    return Regression()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, x.sum(1).tanh()


def config(gas: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS // 8,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "spmd": {"min_shard_elements": 64},
    } | more


def reference(
    optimizer: torch.optim.Optimizer, model: nn.Module, steps: int, schedule: Any = None
) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(*batch(step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


def train(engine: spmdzero.Engine, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = engine(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# fp32 on both sides, other summation orders; ten Adam steps keep losses of order 1 this close.
CLOSE = {"rel": 1e-5, "abs": 1e-6}


def torch_losses(steps: int = 6, **options: Any) -> list[float]:
    model = make_model()
    settings = {"lr": 1e-2, "weight_decay": 0.1} | options
    return reference(torch.optim.AdamW(model.parameters(), **settings), model, steps)


class TestStyles:
    def test_loss_from_the_model(self) -> None:
        engine, *_ = spmdzero.initialize(model=make_model(), config=config())
        assert train(engine, 6) == pytest.approx(torch_losses(), **CLOSE)

    def test_loss_computed_outside(self) -> None:
        engine, *_ = spmdzero.initialize(model=make_model(), config=config())
        losses = []
        for step in range(6):
            x, y = batch(step)
            loss = F.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses == pytest.approx(torch_losses(), **CLOSE)

    def test_train_batch_from_an_iterator(self) -> None:
        engine, *_ = spmdzero.initialize(model=make_model(), config=config())
        batches = (batch(step) for step in range(6))
        losses = [engine.train_batch(batches).item() for _ in range(6)]
        assert losses == pytest.approx(torch_losses(), **CLOSE)

    def test_train_batch_of_keyword_inputs(self) -> None:
        engine, *_ = spmdzero.initialize(model=make_model(), config=config())
        batches = (dict(zip("xy", batch(step), strict=True)) for step in range(3))
        losses = [engine.train_batch(batches).item() for _ in range(3)]
        assert losses == pytest.approx(torch_losses(3), **CLOSE)

    def test_two_halves_accumulate_to_the_whole(self) -> None:
        engine, *_ = spmdzero.initialize(
            model=make_model(), config=config(gas=2, train_micro_batch_size_per_gpu=1)
        )

        def halves() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for step in range(6):
                x, y = batch(step)
                yield x[: ROWS // 2], y[: ROWS // 2]
                yield x[ROWS // 2 :], y[ROWS // 2 :]

        data = halves()
        losses = [engine.train_batch(data).item() for _ in range(6)]
        assert losses == pytest.approx(torch_losses(), **CLOSE)
        assert (engine.global_steps, engine.micro_steps) == (6, 12)
        assert engine.global_samples == 6 * ROWS

    def test_several_backwards_of_one_step_sum(self) -> None:
        engine, *_ = spmdzero.initialize(model=make_model(), config=config())
        losses = []
        for step in range(4):
            x, y = batch(step)
            loss = engine(x, y)
            engine.backward(0.25 * loss, retain_graph=True)
            engine.backward(0.75 * loss)
            engine.step()
            losses.append(loss.item())
        assert losses == pytest.approx(torch_losses(4), **CLOSE)

    @pytest.mark.parametrize(("stage", "gas"), [(2, 1), (1, 2), (2, 2)])
    def test_a_penalty_on_the_weights_outside_of_the_module_counts(
        self, stage: int, gas: int
    ) -> None:
        def penalty(model: nn.Module) -> torch.Tensor:
            return 0.1 * sum(p.pow(2).sum() for p in model.parameters())

        plain = make_model()
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        engine, *_ = spmdzero.initialize(
            model=make_model(),
            config=config(
                gas,
                gradient_clipping=0.0,
                optimizer={"type": "SGD", "params": {"lr": 0.1}},
                zero_optimization={"stage": stage},
            ),
        )
        for step in range(2):
            sgd.zero_grad()
            for micro in range(gas):
                data = batch(step * gas + micro)
                ((plain(*data) + penalty(plain)) / gas).backward()
                engine.backward(engine(*data) + penalty(engine.module))
                engine.step()
            sgd.step()
        for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs.detach(), rtol=1e-5, atol=1e-6)

    def test_backward_returns_the_loss_over_the_accumulation_steps(self) -> None:
        engine, *_ = spmdzero.initialize(model=make_model(), config=config(gas=4))
        loss = engine(*batch(0))
        scaled = engine.backward(loss)
        engine.step()
        assert scaled.item() == pytest.approx(loss.item() / 4, rel=1e-6)


class TestOptimizers:
    def test_a_torch_optimizer_is_taken_over_with_its_groups_and_schedule(self) -> None:
        def build(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
            groups = [
                {"params": list(model.body.parameters()), "lr": 3e-3},
                {"params": list(model.head.parameters()), "weight_decay": 0.0},
            ]
            optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
            return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

        model = make_model()
        optimizer, schedule = build(model)
        expected = reference(optimizer, model, 6, schedule)
        ours = make_model()
        mine, my_schedule = build(ours)
        engine, zero, _, returned = spmdzero.initialize(
            model=ours, optimizer=mine, lr_scheduler=my_schedule, config=config()
        )
        assert returned is my_schedule
        assert isinstance(zero, torch.optim.Optimizer)
        assert train(engine, 6) == pytest.approx(expected, **CLOSE)
        assert engine.get_lr() == [group["lr"] for group in optimizer.param_groups]

    def test_callables_make_optimizer_and_schedule(self) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        expected = reference(optimizer, model, 6, schedule)
        engine, *_ = spmdzero.initialize(
            model=make_model(),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
            lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(
                o, lambda step: 1 / (1 + step)
            ),
            config=config(),
        )
        assert train(engine, 6) == pytest.approx(expected, **CLOSE)

    def test_model_parameters_choose_groups_for_the_config_optimizer(self) -> None:
        ours = make_model()
        engine, optimizer, *_ = spmdzero.initialize(
            model=ours,
            model_parameters=[{"params": ours.head.parameters(), "weight_decay": 0.0, "lr": 2e-2}],
            config=config(gradient_clipping=0.0),
        )
        model = make_model()
        plain = torch.optim.AdamW(model.head.parameters(), lr=2e-2, weight_decay=0.0)
        expected = []
        for step in range(4):
            loss = model(*batch(step))
            plain.zero_grad()
            loss.backward()
            plain.step()
            expected.append(loss.item())
        body = engine.module.body[0].weight.cpu().clone()
        assert train(engine, 4) == pytest.approx(expected, **CLOSE)
        assert torch.equal(engine.module.body[0].weight.cpu(), body)
        assert len(optimizer.state) == 2

    def test_what_is_loaded_after_initialize_stays_in_bf16_too(self) -> None:
        engine, optimizer, *_ = spmdzero.initialize(
            model=make_model(), config=config(bf16={"enabled": True}, optimizer={
                "type": "SGD", "params": {"lr": 0.0}})
        )  # fmt: skip
        loaded = {
            k: torch.full_like(v, 0.25, device="cpu") for k, v in make_model().state_dict().items()
        }
        engine.module.load_state_dict(loaded)
        x, y = batch(0)
        engine.backward(engine(x.bfloat16(), y))
        engine.step()
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter.cpu().float(), loaded[name]), name
            master = optimizer.state[parameter]["master"]
            assert (master.cpu() == 0.25).sum() == parameter.numel()

    def test_attributes_of_parameters_survive_the_move(self) -> None:
        model = make_model()
        for name, parameter in model.named_parameters():
            parameter.no_decay = name.endswith("bias")

        def build(parameters: Any) -> torch.optim.Optimizer:
            chosen = list(parameters)
            return torch.optim.SGD(
                [
                    {"params": [p for p in chosen if p.no_decay], "weight_decay": 0.0},
                    {"params": [p for p in chosen if not p.no_decay], "weight_decay": 0.1},
                ],
                lr=0.1,
            )

        _, optimizer, *_ = spmdzero.initialize(
            model=model, optimizer=build, model_parameters=model.parameters(), config=config()
        )
        assert [len(group["params"]) for group in optimizer.param_groups] == [3, 3]

    def test_the_passed_schedule_wins_over_the_config_as_in_deepspeed(self) -> None:
        engine, *_ = spmdzero.initialize(
            model=make_model(),
            lr_scheduler=lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=0.5),
            config=config(scheduler={"type": "WarmupLR", "params": {}}),
        )
        assert engine.get_lr() == [0.005]

    def test_an_optimizer_that_is_not_elementwise_is_refused_by_name(self) -> None:
        model = make_model()
        with pytest.raises(spmdzero.SpmdZeroConfigError, match=r"LBFGS.*Use AdamW"):
            spmdzero.initialize(
                model=model, optimizer=torch.optim.LBFGS(model.parameters()), config=config()
            )

    def test_tied_and_frozen_and_unused_parameters(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
                self.b.weight = self.a.weight
                self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
                self.unused = nn.Parameter(torch.ones(8))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.b(self.a(x * self.frozen).tanh()).pow(2).mean()

        def build() -> Tied:
            torch.manual_seed(0)
            return Tied()

        engine, *_ = spmdzero.initialize(
            model=build(),
            config=config(
                gradient_clipping=0.0,
                optimizer={"type": "SGD", "params": {"lr": 0.5, "weight_decay": 0.1}},
            ),
        )
        plain = build()
        sgd = torch.optim.SGD([plain.a.weight, plain.unused], lr=0.5, weight_decay=0.1)
        for step in range(3):
            x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x))
            engine.step()
            sgd.zero_grad()
            plain(x).backward()
            # DeepSpeed's ZeRO gives an unused parameter a zero gradient: weight decay moves it.
            plain.unused.grad = torch.zeros(8)
            sgd.step()
        assert engine.module.a.weight is engine.module.b.weight
        for name in ("a.weight", "frozen", "unused"):
            torch.testing.assert_close(
                engine.module.get_parameter(name).cpu(), plain.get_parameter(name).detach()
            )


class TestOutputs:
    def make(self, **outputs: str) -> spmdzero.Engine:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Linear(WIDTH, 2)

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                logits = self.head(x)
                return {"loss": logits.pow(2).mean(), "positive": (x[:, 0] > 0).sum()}

        engine, *_ = spmdzero.initialize(model=Counting(), config=config(spmd={"outputs": outputs}))
        return engine

    def test_an_integer_count_sums_over_the_devices(self) -> None:
        x = batch(0)[0]
        assert self.make(positive="sum")(x)["positive"].item() == (x[:, 0] > 0).sum().item()

    @pytest.mark.parametrize(
        ("outputs", "advice"), [({"positive": "mean"}, "sum"), ({"loss": "agree"}, "mean")]
    )
    def test_a_rule_that_cannot_be_names_one_that_can(
        self, outputs: dict[str, str], advice: str
    ) -> None:
        with pytest.raises(spmdzero.ReplicaRegionError, match=f'declare "{advice}"'):
            self.make(**outputs)(batch(0)[0])


class TestSurface:
    def test_a_model_whose_weights_have_weak_references_trains(self) -> None:
        """nn.LSTM: its parameters become new objects, which the user's optimizer must learn."""

        def build() -> nn.LSTM:
            torch.manual_seed(0)
            return nn.LSTM(WIDTH, 4, batch_first=True)

        plain, ours = build(), build()
        sgd = torch.optim.SGD(plain.parameters(), lr=0.5)
        engine, *_ = spmdzero.initialize(
            model=ours,
            optimizer=torch.optim.SGD(ours.parameters(), lr=0.5),
            config=config(
                gradient_clipping=0.0, spmd={"outputs": {"1.0": "stack", "1.1": "stack"}}
            ),
        )
        for step in range(2):
            x = batch(step)[0].unsqueeze(1).expand(-1, 3, -1).contiguous()
            engine.backward(engine(x)[0].pow(2).mean())
            engine.step()
            sgd.zero_grad()
            plain(x)[0].pow(2).mean().backward()
            sgd.step()
        for ours_, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours_.cpu(), theirs.detach(), rtol=1e-5, atol=1e-6)

    def test_getters_and_counters(self) -> None:
        engine, optimizer, loader, scheduler = spmdzero.initialize(
            model=make_model(),
            config=config(
                gas=2,
                scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
            ),
        )
        assert engine.train_batch_size() == 32
        assert engine.train_micro_batch_size_per_gpu() == 2
        assert engine.gradient_accumulation_steps() == 2
        assert engine.optimizer is optimizer
        assert engine.lr_scheduler is scheduler
        assert loader is None
        assert engine.get_global_grad_norm() is None
        assert not engine.is_gradient_accumulation_boundary()
        engine.backward(engine(*batch(0)))
        engine.step()
        assert (engine.micro_steps, engine.global_steps) == (1, 0)
        assert engine.is_gradient_accumulation_boundary()
        assert not engine.was_step_applied()
        engine.backward(engine(*batch(1)))
        engine.step()
        assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (2, 1, 32)
        assert engine.was_step_applied()
        assert engine.skipped_steps == 0
        assert engine.get_global_grad_norm() > 0
        assert engine.config["gradient_accumulation_steps"] == 2
        assert engine.head is engine.module.head

    def test_args_name_the_config_file(self, tmp_path: Path) -> None:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(config()))
        parser = spmdzero.add_config_arguments(argparse.ArgumentParser())
        args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
        engine, *_ = spmdzero.initialize(args=args, model=make_model())
        assert engine.zero_optimization_stage() == 2

    def test_evaluation_writes_no_buffers_and_makes_no_gradient(self) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))
        engine, *_ = spmdzero.initialize(model=model, config=config())
        engine.backward(engine(batch(0)[0]).pow(2).mean())
        engine.step()
        mean = engine.module[1].running_mean.cpu().clone()
        engine.eval()
        with torch.no_grad():
            out = engine(batch(1)[0])
        assert not out.requires_grad
        assert not engine.module.training
        assert torch.equal(engine.module[1].running_mean.cpu(), mean)
        assert torch.isfinite(out.cpu()).all()

    def test_no_device_read_off_the_print_steps(self) -> None:
        import torch_xla.debug.metrics as metrics

        engine, *_ = spmdzero.initialize(model=make_model(), config=config(steps_per_print=4))
        for step in range(2):
            engine.backward(engine(*batch(step)))
            engine.step()
        runtime.wait()
        reads = []
        for step in range(2, 6):
            metrics.clear_all()
            engine.backward(engine(*batch(step)))
            engine.step()
            data = metrics.metric_data("TransferFromDeviceTime")
            reads.append(data[0] if data else 0)
        assert [count > 0 for count in reads] == [False, True, False, False]

    def test_the_same_seed_repeats_dropout_and_another_does_not(self) -> None:
        def losses(seed: int) -> list[float]:
            model = nn.Sequential(make_model().body, nn.Dropout(0.5), nn.Linear(24, 1))
            torch.manual_seed(0)
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.1)
            engine, *_ = spmdzero.initialize(model=model, config=config())
            torch.manual_seed(seed)
            found = []
            for step in range(3):
                loss = engine(batch(step)[0]).pow(2).mean()
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            return found

        assert losses(1) == losses(1)
        assert losses(1) != losses(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_is_not_that_of_the_engines_numbers(dtype: torch.dtype) -> None:
    found = []
    data = [batch(step) for step in range(5)]
    for default in (torch.float32, dtype):
        model = make_model()
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
        torch.set_default_dtype(default)
        try:
            engine, *_ = spmdzero.initialize(
                model=model,
                optimizer=optimizer,
                config={"train_batch_size": ROWS, "zero_allow_untested_optimizer": True}
                | {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "auto_cast": True}},
            )
            losses = [engine.train_batch(iter([pair])).item() for pair in data]
        finally:
            torch.set_default_dtype(torch.float32)
        states = {name: str(tensor.dtype) for name, tensor in engine.named_tensors().items()}
        found.append((losses, states))
    assert found[0] == found[1]
