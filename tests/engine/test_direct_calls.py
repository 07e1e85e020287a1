"""A module that is called in the place of its engine: the numbers stay, and it is said once."""

import copy
import inspect
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import current
from spmdzero.errors import SpmdZeroUsageError
from tests.support.bounds import assert_summed
from tests.support.engines import Mean, one_call, start
from tests.support.selected import product_rows

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

Call = Callable[[spmdzero.Engine, nn.Module, torch.Tensor], torch.Tensor]


def make() -> tuple[spmdzero.Engine, nn.Sequential]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    adam = {"type": "Adam", "params": {"lr": 0.1}}
    return start(module, optimizer=adam, gradient_clipping=0), module


def losses(call: Call, *, steps: int = 3, plain: bool = False) -> list[float]:
    engine, module = make()
    x = torch.randn(engine.mesh.size, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(steps):
        loss = call(engine, module, x).square().mean()
        if plain:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


DIRECT: dict[str, Call] = {
    "module": lambda engine, module, x: module(x.to(engine.device)),
    "submodules": lambda engine, module, x: module[2](module[1](module[0](x.to(engine.device)))),
}


@pytest.mark.parametrize(
    ("name", "plain"),
    product_rows(DIRECT, [False, True], quick={("module", False), ("submodules", True)}),
)
def test_a_module_called_without_its_engine_trains_alike_and_it_is_said_once(
    name: str, plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = losses(lambda engine, module, x: engine(x))
    with caplog.at_level(logging.WARNING, "spmdzero"):
        assert losses(DIRECT[name], plain=plain) == pytest.approx(expected, rel=1e-5)
    assert caplog.text.count("is called without its engine to train") == 1
    assert "Call the engine, engine(...)" in caplog.text


def test_nothing_is_said_of_the_engine_itself_and_of_what_makes_no_gradient(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, module = make()
    x = torch.randn(engine.mesh.size, 4)
    with caplog.at_level(logging.WARNING, "spmdzero"):
        losses(lambda engine, module, x: engine(x))
        # A weight penalty is no call of the module.
        losses(lambda engine, module, x: engine(x) + module[0].weight.square().mean())
        # Both forwards of a step may come before its first backward.
        engine.set_gradient_accumulation_boundary(False)
        first, second = engine(x), engine(x)
        for output in (first, second):
            engine.backward((output + module[0].weight.square().mean()).mean())
            engine.step()
        with torch.no_grad():
            module(x.to(engine.device))
            module[0](x.to(engine.device))
        module.eval()(x.to(engine.device))
        copy.deepcopy(module).train()(x.to(engine.device))
    assert "without its engine" not in caplog.text


def test_a_cpu_input_is_named_before_it_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, module = make()
    said = {"torch_xla": "Expected XLA tensor", "jax": "to be on the same device"}
    with (
        caplog.at_level(logging.WARNING, "spmdzero"),
        torch.no_grad(),
        pytest.raises(RuntimeError, match=said[current().name]),
    ):
        module(torch.ones(8, 4))
    assert "with a tensor on the CPU" in caplog.text
    assert "x.to(engine.device)" in caplog.text


@pytest.mark.backends("jax")
def test_the_hook_that_says_it_leaves_capture_alone() -> None:
    engine = start(Mean())
    for _ in range(5):
        one_call(engine, torch.randn(engine.mesh.size, 4))
    assert (engine.capture.replayed, engine.capture.reason) == (2, None)


HALF = {"fp16": {"enabled": True, "initial_scale_power": 8}}
PLAIN = {
    "step": lambda engine, loss: (loss.backward(), engine.step()),
    "read": lambda engine, loss: (loss.backward(), engine.module.line.weight.grad),
    "backward": lambda engine, loss: (loss.backward(retain_graph=True), engine.backward(loss)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_gradients_of_a_loss_that_fp16_did_not_scale_are_refused(name: str) -> None:
    engine = start(Mean(), **HALF)
    x = torch.ones(engine.mesh.size, 4, dtype=torch.float16).to(engine.device)
    loss = engine.module(x)
    with pytest.raises(SpmdZeroUsageError, match=r"256 times too small. Call engine.backward"):
        PLAIN[name](engine, loss)
    # Nothing of them is left.
    assert engine.module.line.weight.grad is None
    engine.scale(engine.module(x)).backward()
    scaled = engine.module.line.weight.grad.cpu()
    engine.optimizer.zero_grad()
    engine.backward(engine(x))
    assert_summed(scaled, engine.module.line.weight.grad.cpu())


def test_gradients_that_fp16_did_not_scale_are_refused_at_the_line_of_their_backward() -> None:
    engine = start(Mean(), **HALF)
    x = torch.ones(engine.mesh.size, 4, dtype=torch.float16).to(engine.device)
    # What is asked for is no gradient of a step.
    torch.autograd.grad(engine.module(x), engine.module.line.weight)
    for _ in range(2):
        loss = engine.module(x)
        line = inspect.currentframe().f_lineno + 1
        loss.backward()
        with pytest.raises(SpmdZeroUsageError, match=rf"{Path(__file__).name}:{line}: Mean has"):
            engine.step()
    # Of what the module has no part in, the step that notices it is all there is to name.
    engine.module.line.weight.square().sum().backward()
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(SpmdZeroUsageError, match=rf"{Path(__file__).name}:{line}: Mean has"):
        engine.step()


def test_one_backward_scales_for_every_engine_that_it_runs_through() -> None:
    """A generator is trained through its discriminator; DeepSpeed's page calls the epilogue."""
    first, second = start(Mean(), **HALF), start(Mean(), **HALF)
    x = torch.ones(first.mesh.size, 4, dtype=torch.float16).to(first.device)
    first.backward(first(x) + second.module(x))
    for engine in (first, second):
        assert engine._backward_epilogue() is None
        assert engine.module.line.weight.grad is not None
        engine.step()


def test_calls_with_ever_new_shapes_are_said_to_compile_each_and_the_remedy_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    settings = GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16,
        eos_token_id=1, bos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    engine = start(GPT2LMHeadModel(settings), zero_optimization={"stage": 1})
    model = engine.module.eval()
    ids = torch.randint(3, 32, (1, 4))

    def generate(model: nn.Module, length: int) -> torch.Tensor:
        here = ids.to(next(model.parameters()).device)
        return model.generate(here, max_new_tokens=length, min_new_tokens=length, do_sample=False)

    with caplog.at_level(logging.WARNING, "spmdzero"):
        with torch.no_grad():
            for _ in range(3):
                model(ids.to(engine.device), use_cache=False)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        ours = generate(model, 3)
        generate(model, 3)
    (said,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said.startswith("GPT2LMHeadModel is called without its engine with inputs of a third")
    scope = {"engine": engine, "model": model}
    exec(said.partition("on the host: ")[2], scope)
    text = scope["text"].eval()
    assert next(text.parameters()).device.type == "cpu"
    assert torch.equal(generate(text, 3), ours.cpu())
