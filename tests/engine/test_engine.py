"""The engine's styles, its inputs and outputs, its getters and counters."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.backend import runtime
from tests.engine.regression import CLOSE, ROWS, WIDTH, batch, config, make_model, torch_losses
from tests.support.bounds import rounded
from tests.support.engines import assert_trained_as, one_call, reads, three_calls

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

Pair = tuple[torch.Tensor, torch.Tensor]


def start(model: nn.Module, **more: Any) -> spmdzero.Engine:
    return spmdzero.initialize(model=model, config=config(**more))[0]


class TestStyles:
    @staticmethod
    def loss_outside(engine: spmdzero.Engine, data: Pair) -> torch.Tensor:
        x, y = (tensor.to(engine.device) for tensor in data)
        loss = F.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        return loss

    @staticmethod
    def keywords(engine: spmdzero.Engine, data: Pair) -> torch.Tensor:
        return engine.train_batch(iter([dict(zip("xy", data, strict=True))]))

    @staticmethod
    def halves(engine: spmdzero.Engine, data: Pair) -> torch.Tensor:
        return engine.train_batch(zip(*(tensor.chunk(2) for tensor in data), strict=True))

    @staticmethod
    def two_backwards(engine: spmdzero.Engine, data: Pair) -> torch.Tensor:
        loss = engine(*data)
        engine.backward(0.25 * loss, retain_graph=True)
        engine.backward(0.75 * loss)
        engine.step()
        return loss

    @pytest.mark.parametrize(
        ("step", "gas"),
        [
            (three_calls, 1), (loss_outside, 1), (two_backwards, 1), (one_call, 1), (keywords, 1),
            (halves, 2),
        ],
    )  # fmt: skip
    def test_each_style_trains_as_torch(self, step: Callable[..., torch.Tensor], gas: int) -> None:
        rows = ROWS // 8 // gas
        engine = start(
            make_model(), gradient_accumulation_steps=gas, train_micro_batch_size_per_gpu=rows
        )
        losses = [step(engine, batch(index)).item() for index in range(6)]
        assert losses == pytest.approx(torch_losses(), **CLOSE)
        counters = (engine.global_steps, engine.micro_steps, engine.global_samples)
        assert counters == (6, 6 * gas, 6 * ROWS)

    @pytest.mark.parametrize(("stage", "gas"), [(2, 1), (1, 2), (2, 2)])
    def test_a_penalty_on_the_weights_outside_of_the_module_counts(
        self, stage: int, gas: int
    ) -> None:
        def penalty(model: nn.Module) -> torch.Tensor:
            return 0.1 * sum(p.pow(2).sum() for p in model.parameters())

        plain = make_model()
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        engine = start(
            make_model(),
            gradient_accumulation_steps=gas,
            gradient_clipping=0.0,
            optimizer={"type": "SGD", "params": {"lr": 0.1}},
            zero_optimization={"stage": stage},
        )
        for step in range(2):
            sgd.zero_grad()
            for micro in range(gas):
                data = batch(step * gas + micro)
                ((plain(*data) + penalty(plain)) / gas).backward()
                engine.backward(engine(*data) + penalty(engine.module))
                engine.step()
            sgd.step()
        assert_trained_as(engine, plain)

    def test_backward_returns_the_loss_over_the_accumulation_steps(self) -> None:
        engine = start(make_model(), gradient_accumulation_steps=4)
        loss = engine(*batch(0))
        scaled = engine.backward(loss)
        engine.step()
        assert scaled.item() == rounded(loss.item() / 4)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(x).pow(2).mean(), "positive": (x[:, 0] > 0).sum()}


def test_an_integer_count_sums_over_the_devices() -> None:
    x = batch(0)[0]
    engine = start(Counting(), spmd={"outputs": {"positive": "sum"}})
    assert engine(x)["positive"].item() == (x[:, 0] > 0).sum().item()


@pytest.mark.parametrize(
    ("outputs", "advice"), [({"positive": "mean"}, "sum"), ({"loss": "agree"}, "mean")]
)
def test_a_rule_that_cannot_be_names_one_that_can(outputs: dict[str, str], advice: str) -> None:
    with pytest.raises(spmdzero.ReplicaRegionError, match=f'declare "{advice}"'):
        start(Counting(), spmd={"outputs": outputs})(batch(0)[0])


class TestSurface:
    def test_initialize_returns_four_that_the_engine_knows(self) -> None:
        warm_up = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
        engine, optimizer, loader, scheduler = spmdzero.initialize(
            model=make_model(), config=config(scheduler=warm_up)
        )
        assert (engine.optimizer, engine.lr_scheduler, loader) == (optimizer, scheduler, None)
        assert engine.config["scheduler"] == warm_up
        assert engine.head is engine.module.head
        assert engine.get_global_grad_norm() is None

    def test_args_name_the_config_file(self, tmp_path: Path) -> None:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(config()))
        parser = spmdzero.add_config_arguments(argparse.ArgumentParser())
        args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
        engine, *_ = spmdzero.initialize(args=args, model=make_model())
        assert engine.zero_optimization_stage() == 2

    def test_evaluation_writes_no_buffers_and_makes_no_gradient(self) -> None:
        engine = start(nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)))
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
        engine = start(make_model(), steps_per_print=4)
        three_calls(engine, batch(0), batch(1))
        runtime.wait()
        read = []
        for step in range(2, 6):
            before = reads()
            three_calls(engine, batch(step))
            read.append(reads() > before)
        assert read == [False, True, False, False]

    def test_the_same_seed_repeats_dropout_and_another_does_not(self) -> None:
        def losses(seed: int) -> list[float]:
            model = nn.Sequential(make_model().body, nn.Dropout(0.5), nn.Linear(24, 1))
            torch.manual_seed(0)
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.1)
            engine = start(model)
            torch.manual_seed(seed)
            found = []
            for step in range(3):
                loss = engine(batch(step)[0]).pow(2).mean()
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            return found

        assert losses(1) == losses(1) != losses(2)


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
            losses = [one_call(engine, pair).item() for pair in data]
        finally:
            torch.set_default_dtype(torch.float32)
        states = {name: str(tensor.dtype) for name, tensor in engine.named_tensors().items()}
        found.append((losses, states))
    assert found[0] == found[1]
