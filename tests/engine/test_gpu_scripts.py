"""What scripts for GPUs write around a model and an engine: it trains all the same, and is told."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.second(self.first(x).relu()), labels)


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return x, x.argmax(dim=1) % 3


def start(model: nn.Module) -> spmdzero.Engine:
    return spmdzero.initialize(model=model, config=CONFIG)[0]


def losses(engine: spmdzero.Engine, wrap: Callable[[Any], Any] = lambda step: step) -> list[float]:
    """The losses of three steps, each called through what `wrap` makes of a step."""

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = engine(x, labels)
        engine.backward(loss)
        engine.step()
        return loss

    wrapped = wrap(step)
    return [wrapped(*rows(index)).item() for index in range(3)]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return losses(start(Classifier()))


def refuse_to_compile(graph: Any, inputs: Any) -> Any:
    raise AssertionError("torch's compiler got a graph of the model")


def compiled(target: Any) -> Any:
    return torch.compile(target, backend=refuse_to_compile)


@pytest.fixture
def alone() -> None:
    """A process group of one process, without which torch makes no DistributedDataParallel."""
    spmdzero.init_distributed()


WRAPPERS = {
    "torch.compile": compiled,
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_model_in_a_wrapper_for_gpus_trains_as_the_module_in_it(
    name: str, plain: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    module = Classifier()
    wrapped = WRAPPERS[name](module)
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        engine = start(wrapped)
    assert engine.module is module
    assert next(iter(engine.module.state_dict())) == "first.weight"
    assert losses(engine) == plain
    assert f"{name}(model) has no effect of its own" in caplog.text
    # The script's own name for its model still computes.
    with torch.no_grad():
        assert wrapped(*(each.to(engine.device) for each in rows(0))).item() < plain[0]


@pytest.mark.usefixtures("alone")
def test_wrappers_around_wrappers_are_all_taken_off() -> None:
    module = Classifier()
    assert start(nn.parallel.DistributedDataParallel(compiled(module))).module is module


def test_compiled_parts_of_a_model_run_uncompiled(
    plain: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    model = Classifier()
    model.first = compiled(model.first)
    model.second.compile(backend=refuse_to_compile)
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        assert losses(start(model)) == plain
    assert "torch.compile of first, second has no effect of its own" in caplog.text


# Of Dynamo's own look at a loss of torch_xla, as a lone process doesn't show it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_step_is_xlas(plain: list[float], caplog: pytest.LogCaptureFixture) -> None:
    engine = start(Classifier())
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        assert losses(engine, compiled) == plain
    assert caplog.text.count("torch.compile around the engine has no effect") == 1


def test_a_compiled_engine_is_xlas(plain: list[float], caplog: pytest.LogCaptureFixture) -> None:
    engine = start(Classifier())
    call = compiled(engine)
    found = []
    with caplog.at_level(logging.INFO, logger="spmdzero"):
        for index in range(3):
            loss = call(*rows(index))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    assert found == plain
    assert caplog.text.count("torch.compile around the engine has no effect") == 1
    # What a script compiles besides is torch's.
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
