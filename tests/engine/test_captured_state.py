"""What the user holds or changes beside the engine, and what replayed steps make of it."""

import collections
import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import spmdzero
from tests.engine.captured import (
    ROWS,
    WAYS,
    WIDTH,
    assert_twins_agree,
    captured,
    make_engine,
    row,
    rows,
    twins,
)

pytestmark = pytest.mark.backends("jax")

Script = Callable[[spmdzero.Engine], list[float]]


class Plain:
    """A user's own object."""

    def __init__(self) -> None:
        self.factor = 1.0


class Net(nn.Module):
    """A loss that depends on whatever `factor` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(()))
        self.number = torch.tensor(2.0)
        self.array = np.ones(2, np.float32)
        self.names, self.queue, self.table = {"a"}, collections.deque([1.0]), {"one": 1.0}
        self.plain, self.read = Plain(), 0

    def factor(self) -> Any:
        self_made = 3.0 if "b" in self.names else 1.0
        self_made *= self.queue[-1] * self.plain.factor * (5.0 if "two" in self.table else 1.0)
        return self_made * self.number * float(self.array.sum()) * self.scale

    def forward(self, x: torch.Tensor, weight: Any = 1.0) -> torch.Tensor:
        return self.second(self.first(x).tanh()).square().mean() * self.factor() * weight


def train(engine: spmdzero.Engine, first: int, count: int) -> list[float]:
    return [engine.train_batch((rows(i),)).item() for i in range(first, first + count)]


def assert_capture_changes_nothing(
    script: Script, module: Callable[[], nn.Module] = Net
) -> spmdzero.Engine:
    """The numbers and the state of a script are those without capture; returns the engine."""
    engines = twins(module)
    assert_twins_agree(engines, script)
    assert engines[0].capture.replayed == 0
    return engines[1]


def write_a_cpu_tensor(module: Net) -> None:
    module.number.fill_(0.5)


def write_an_array(module: Net) -> None:
    module.array[0] = 4.0


def add_to_a_set(module: Net) -> None:
    module.names.add("b")


def append_to_a_deque(module: Net) -> None:
    module.queue.append(3.0)


def rename_a_key(module: Net) -> None:
    module.table["two"] = module.table.pop("one")


def write_an_object(module: Net) -> None:
    module.plain.factor = 2.0


def write_a_buffer(module: Net) -> None:
    module.scale.fill_(0.5)


def make_a_buffer_of_a_number(module: Net) -> None:
    module.scale = torch.tensor(2.0, device=module.scale.device)


@pytest.mark.parametrize(
    "act",
    [
        write_a_cpu_tensor,
        write_an_array,
        add_to_a_set,
        append_to_a_deque,
        rename_a_key,
        write_an_object,
        write_a_buffer,
        make_a_buffer_of_a_number,
    ],
)
def test_a_change_in_place_is_seen(act: Callable[[Any], None]) -> None:
    def script(engine: spmdzero.Engine) -> list[float]:
        before = train(engine, 0, 4)
        seen.append(engine.capture.replayed)
        act(engine.module)
        return before + train(engine, 4, 4)

    seen: list[int] = []
    assert_capture_changes_nothing(script)
    assert seen == [0, 1]


def test_a_tensor_made_in_inference_mode_is_no_obstacle() -> None:
    def script(engine: spmdzero.Engine) -> list[float]:
        with torch.inference_mode():
            engine.module.number = torch.tensor(3.0)
        return train(engine, 0, 5)

    assert assert_capture_changes_nothing(script).capture.replayed == 2


def test_a_buffer_made_of_a_number_can_be_written() -> None:
    def script(engine: spmdzero.Engine) -> list[float]:
        make_a_buffer_of_a_number(engine.module)
        before = train(engine, 0, 5)
        # `square` has the number 2 in its derivative, whose buffer the buffer's was.
        engine.module.scale.fill_(0.5)
        return before + train(engine, 5, 3)

    assert assert_capture_changes_nothing(script).capture.replayed == 5


@pytest.mark.parametrize(("before", "after"), [(2.0, 0.5), (1.0, 0.5), (0.5, 1.0)])
def test_a_number_on_the_devices_is_an_input(before: float, after: float) -> None:
    def script(engine: spmdzero.Engine) -> list[float]:
        numbers = [before] * 5 + [after] * 3
        losses = []
        for index, number in enumerate(numbers):
            weight = torch.tensor(number, device=engine.device)
            losses.append(engine.train_batch(iter([(rows(index), weight)])).item())
        return losses

    assert assert_capture_changes_nothing(script).capture.replayed == 5


class LayerDrop(Net):
    """Leaves a layer out by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(1)

    def forward(self, x: torch.Tensor, weight: Any = 1.0) -> torch.Tensor:
        return super().forward(x if self.generator.random() < 0.5 else self.first(x), weight)


def test_a_generator_of_the_module_is_drawn_from_at_each_step() -> None:
    engine = assert_capture_changes_nothing(lambda engine: train(engine, 0, 10), LayerDrop)
    assert engine.capture.replayed == 0
    assert "generator" in str(engine.capture.reason)


def held_by_clone(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def held_by_copy(module: nn.Module) -> list[torch.Tensor]:
    return [*copy.deepcopy(module).parameters()]


def held_by_detach(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in module.parameters()]


def held_by_state_dict(module: nn.Module) -> list[torch.Tensor]:
    return [*module.state_dict().values()]


def held_by_views(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().view(-1) for parameter in module.parameters()]


# Before the first step, between traced ones, between replayed ones.
@pytest.mark.parametrize(
    "when", [0, *(pytest.param(when, marks=pytest.mark.slow) for when in (1, 4))]
)
@pytest.mark.parametrize(
    "hold", [held_by_clone, held_by_copy, held_by_detach, held_by_state_dict, held_by_views]
)
def test_what_the_user_holds_of_the_weights_is_what_it_is_without_capture(
    hold: Callable[[nn.Module], list[torch.Tensor]], when: int
) -> None:
    def script(engine: spmdzero.Engine) -> list[float]:
        losses = train(engine, 0, when)
        held = hold(engine.module)
        losses += train(engine, when, 6 - when)
        return losses + [tensor.detach().cpu().double().sum().item() for tensor in held]

    assert assert_capture_changes_nothing(script).capture.replayed >= 2


def test_an_average_of_the_weights_follows_them() -> None:
    def script(engine: spmdzero.Engine) -> list[float]:
        live = engine.module.state_dict()
        average = {name: tensor.clone() for name, tensor in live.items()}
        losses = []
        for index in range(6):
            losses += train(engine, index, 1)
            for name, tensor in average.items():
                tensor.lerp_(live[name], 0.5)
        return losses + [tensor.sum().item() for tensor in average.values()]

    assert assert_capture_changes_nothing(script).capture.replayed == 3


def test_a_parameter_that_leaves_its_group_is_no_longer_trained() -> None:
    def script(engine: spmdzero.Engine) -> list[float]:
        before = train(engine, 0, 4)
        engine.optimizer.param_groups[0]["params"].pop()
        return before + train(engine, 4, 4)

    assert assert_capture_changes_nothing(script).capture.replayed == 2


def test_micro_batches_of_another_plan_add_to_the_accumulators_of_now() -> None:
    engine = captured(make_engine(Net(), gradient_accumulation_steps=2))
    accumulators = engine._training.state.accumulators
    engine.set_train_batch_size(ROWS)
    engine.set_train_batch_size(2 * ROWS)
    assert engine._training.state.accumulators is accumulators


class Masked(nn.Module):
    """Has a tensor on the devices that is an attribute; adds to it where `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mask, self.counts = torch.ones(WIDTH), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.mask.add_(1)
        return (self.layer(x) * self.mask).square().mean()


def write_the_mask(module: Masked) -> None:
    module.mask.mul_(2)


def exchange_the_mask(module: Masked) -> None:
    module.mask = torch.full((WIDTH,), 3.0).to(module.mask.device)


def take_a_parameter(module: Masked) -> None:
    module.mask = module.layer.bias.detach()


@pytest.mark.parametrize("way", [row(way) for way in WAYS])
def test_a_tensor_attribute_on_the_devices_is_followed(way: str) -> None:
    run = WAYS[way]
    engines = twins(Masked)
    losses: list[list[float]] = [[], []]
    for engine, found in zip(engines, losses, strict=True):
        engine.module.mask = engine.module.mask.to(engine.device)
        for act in (write_the_mask, exchange_the_mask, take_a_parameter):
            found += run(engine, 5)
            assert engine.capture.reason is None or engine is engines[0], act
            act(engine.module)
        # What a parameter and an attribute share, a step would write for both.
        found += run(engine, 5)
    assert losses[0] == losses[1]
    assert "neither an input nor part of the module" in engines[1].capture.reason


@pytest.mark.parametrize(
    "way", ["three calls", pytest.param("train_batch", marks=pytest.mark.slow)]
)
def test_what_a_refused_trace_wrote_is_undone(way: str) -> None:
    engines = twins(Masked)
    for engine in engines:
        engine.module.mask, engine.module.counts = engine.module.mask.to(engine.device), True
    traced, tried = (WAYS[way](engine, 7) for engine in engines)
    assert traced == tried
    assert engines[1].module.mask.tolist() == [8.0] * WIDTH
