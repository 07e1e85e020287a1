"""What brings tracing back: changes after which a step is captured anew."""

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmdzero
from spmdzero.backend import arrays, counters
from spmdzero.backend.pure import ModuleWatch
from spmdzero.integrations._plain_torch import watch_steps
from tests.engine.captured import (
    Residual,
    assert_twins_agree,
    batches,
    captured,
    make_engine,
    three_calls,
    train,
    twins,
)

pytestmark = pytest.mark.backends("jax")


def both(engines: tuple[spmdzero.Engine, ...], act: Callable[[spmdzero.Engine], Any]) -> None:
    """Trains each engine, acts on it, and trains on; they must agree afterwards."""

    def run(engine: spmdzero.Engine) -> list[float]:
        first = train(engine, 4)
        act(engine)
        return first + train(engine, 5, first=4)

    assert_twins_agree(engines, run)


def freeze(engine: spmdzero.Engine) -> None:
    for parameter in engine.module.blocks[1].parameters():
        parameter.requires_grad_(False)


def drop_more(engine: spmdzero.Engine) -> None:
    engine.module.blocks[0][3].p = 0.5


def evaluate_a_part(engine: spmdzero.Engine) -> None:
    engine.module.blocks[0][3].eval()


def swap_activation(engine: spmdzero.Engine) -> None:
    engine.module.blocks[0][2] = nn.Tanh()


def evaluate_all(engine: spmdzero.Engine) -> None:
    engine.eval()


def set_numbers_of_the_optimizer(engine: spmdzero.Engine) -> None:
    engine.optimizer.param_groups[0].update(lr=3e-3, weight_decay=0.3, betas=(0.8, 0.9))


def load_weights(engine: spmdzero.Engine) -> None:
    weights = {k: v.cpu() * 0.5 for k, v in engine.module.state_dict().items()}
    engine.module.load_state_dict(weights)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (freeze, "one more program"),
        (set_numbers_of_the_optimizer, ""),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (drop_more, "'p' of submodule 'blocks.0.3': 0.1 -> 0.5"),
                (evaluate_a_part, "submodule 'blocks.0.3' is now in eval mode"),
                (swap_activation, "'2' of modules of submodule 'blocks.0': a GELU -> a Tanh"),
                (evaluate_all, "the module is now in eval mode"),
                (load_weights, ""),
            )
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_change_captures_anew_and_says_so_once(
    act: Callable[[spmdzero.Engine], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    traced, replayed = engines = twins(Residual)
    with caplog.at_level(logging.INFO, "spmdzero"):
        both(engines, act)
    assert traced.capture.replayed == 0
    assert replayed.capture.reason is None
    assert caplog.text.count("train_batch compiles") == (1 if said else 0)
    assert said in caplog.text


def test_another_shape_is_another_program_and_the_first_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = captured(make_engine())
    with caplog.at_level(logging.INFO, "spmdzero"):
        train(engine, 1, length=6)
        assert "one more program: inputs of other shapes" in caplog.text
        assert engine.capture.reason is not None
        train(engine, 1)
        assert engine.capture.reason is None
        train(engine, 5, length=6)
        assert engine.capture.reason is None
    assert caplog.text.count("train_batch compiles") == 1


class Switching(torch.optim.Optimizer):
    """Goes up instead of down where an attribute of its own says so."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.options = {"up": [False]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=group["lr"] * (1 if self.options["up"][0] else -1))


def test_an_attribute_of_the_users_own_optimizer_is_followed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[Switching] = []

    def own(parameters: Any) -> Switching:
        made.append(Switching(parameters))
        return made[-1]

    def go_up(engine: spmdzero.Engine) -> None:
        made[engines.index(engine)].options["up"][0] = True

    engines = twins(own=own)
    with caplog.at_level(logging.INFO, "spmdzero"):
        both(engines, go_up)
    assert engines[1].capture.reason is None
    assert caplog.text.count("train_batch compiles one more program") == 1


class OwnDict(dict[str, int]):
    pass


class OwnUserDict(collections.UserDict[str, int]):
    pass


class OwnList(list[int]):
    pass


@dataclasses.dataclass
class OwnData:
    n: int = 1


class BranchesByAttribute(Residual):
    def forward(self, x: torch.Tensor, beside: Any) -> torch.Tensor:
        loss = super().forward(x)
        return loss.sqrt() if beside.rooted else loss


@pytest.mark.parametrize(
    "container",
    [
        OwnData,
        *(pytest.param(c, marks=pytest.mark.slow) for c in (OwnDict, OwnUserDict, OwnList)),
    ],
)
def test_an_attribute_of_a_container_among_the_inputs_is_followed(
    container: Callable[[], Any],
) -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        losses = []
        for step, (x,) in enumerate(batches(12)):
            beside = container()
            beside.rooted = step >= 6
            losses.append(engine.train_batch(iter([(x, beside)])).item())
        return losses

    engines = twins(BranchesByAttribute)
    assert_twins_agree(engines, run)
    # Of the six steps of each kind three or four are traced.
    assert engines[1].capture.replayed >= 4


def default_dtype(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    @contextlib.contextmanager
    def within() -> Iterator[None]:
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    return within()


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (lambda: torch.autocast("xla", dtype=torch.bfloat16), torch.float32),
        pytest.param(lambda: default_dtype(torch.float64), torch.float32, marks=pytest.mark.slow),
        pytest.param(contextlib.nullcontext, torch.float16, marks=pytest.mark.slow),
    ],
    ids=["autocast", "default dtype", "input dtype"],
)
def test_another_mode_or_dtype_is_another_program(
    mode: Callable[[], contextlib.AbstractContextManager[Any]],
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        losses = train(engine, 5)
        source = ((x.to(dtype),) for (x,) in batches(5))
        with mode():
            losses += [engine.train_batch(source).item() for _ in range(5)]
        reasons.append(engine.capture.reason)
        return losses + train(engine, 2)

    reasons: list[str | None] = []
    engines = twins()
    with caplog.at_level(logging.INFO, "spmdzero"):
        assert_twins_agree(engines, run)
    assert reasons[1] is None
    assert engines[1].capture.replayed == 6
    assert caplog.text.count("train_batch compiles one more program") == 1


class Tagged(Residual):
    """Takes what isn't a tensor beside its batch."""

    def forward(self, x: torch.Tensor, tag: Any = None) -> torch.Tensor:
        return super().forward(x)


class WithTensor(dict[str, int]):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(3)


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (object(), "an input is a object, whose content can't be compared between steps"),
        (torch.ones(3, requires_grad=True), "an input requires a gradient"),
        (
            WithTensor(),
            "an input is a WithTensor with a tensor that is not one of its items",
        ),
    ],
    ids=["object", "gradient", "attribute"],
)
def test_an_input_that_cant_be_compared_is_traced(beside: Any, said: str) -> None:
    engine = make_engine(Tagged())
    for (x,) in batches(5):
        engine.train_batch(iter([(x, beside)]))
    assert engine.capture.reason == said
    assert engine.capture.replayed == 0


class Signed(Residual):
    """Goes another way for the sign of a number beside its batch."""

    def forward(self, x: torch.Tensor, number: float) -> torch.Tensor:
        return super().forward(x) * (2 + math.copysign(1.0, number))


@pytest.mark.slow
def test_zeros_of_another_sign_are_other_inputs() -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        numbers = [*[0.0] * 7, -0.0]
        data = zip(batches(8), numbers, strict=True)
        return [engine.train_batch(iter([(x, number)])).item() for (x,), number in data]

    assert_twins_agree(twins(Signed), run)


@dataclasses.dataclass
class Doubled:
    """A batch that makes a tensor of another one itself."""

    x: torch.Tensor
    twice: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.x * 2


class Sum(Residual):
    def forward(self, one: Doubled, other: torch.Tensor) -> torch.Tensor:
        return super().forward(one.twice + other)


def test_a_dataclass_that_computes_a_field_itself_is_an_input() -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        data = [(Doubled(x), x.flip(0)) for (x,) in batches(7)]
        return [engine.train_batch(iter([batch])).item() for batch in data]

    assert_twins_agree(twins(Sum), run)


def test_a_state_with_another_sharding_is_used_and_laid_out_again() -> None:
    def run(engine: spmdzero.Engine) -> list[float]:
        losses = train(engine, 5)
        state = engine.optimizer.state[engine.module.blocks[0][1].weight]
        laid = arrays.forms_of([state["exp_avg"]])
        state["exp_avg"] = engine.mesh.place(state["exp_avg"].cpu())
        losses += train(engine, 2, first=5)
        assert arrays.forms_of([state["exp_avg"]]) == laid
        return losses

    engines = twins()
    assert_twins_agree(engines, run)
    assert engines[1].capture.reason is None


def test_a_hook_that_only_asks_for_gradients_keeps_no_step_from_being_captured() -> None:
    engine = make_engine()

    def makes_inputs_require_grads(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        output.requires_grad_(True)

    engine.module.norm.register_forward_hook(makes_inputs_require_grads)
    train(engine, 5)
    assert engine.capture.reason is None


@pytest.mark.backends("jax")
def test_what_tells_of_plain_torch_has_no_step_traced() -> None:
    watch_steps()
    engine = make_engine()
    three_calls(engine, 1)
    assert (engine.capture.compared, engine.capture.traced) == (1, 0)


def test_a_hook_runs_at_each_step_while_it_is_there() -> None:
    engine = captured(make_engine())
    calls: list[str] = []
    handle = engine.module.blocks[0].register_forward_hook(lambda *_: calls.append("called"))
    train(engine, 3)
    assert len(calls) == 3
    assert "a forward hook of submodule 'blocks.0'" in str(engine.capture.reason)
    handle.remove()
    captured(engine)
    assert len(calls) == 3


@pytest.mark.slow
def test_a_set_batch_size_is_followed() -> None:
    engines = make_engine(capture=False), make_engine()
    both(engines, lambda engine: engine.set_train_batch_size(2 * engine.train_batch_size()))
    assert engines[1].capture.reason is None


class Configured(Residual):
    """As transformers' models: `save_pretrained` assigns `config.architectures` anew."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(names=["a"], sizes={"wide": (1, [2])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        return loss / 2 if self.config.names[-1] == "half" else loss


def test_an_equal_container_is_no_change_and_is_watched_from_then_on() -> None:
    engine = captured(make_engine(Configured()))
    config = engine.module.config
    before = counters.compiled()[0]
    for _ in range(2):
        config.names, config.sizes = ["a"], {"wide": (1, [2])}
        whole = train(engine, 1)[0]
        assert engine.capture.reason is None
    assert counters.compiled()[0] == before
    # The new list is the one that the forward reads.
    config.names.append("half")
    assert train(engine, 1)[0] < 0.75 * whole
    assert engine.capture.reason is not None


@pytest.mark.parametrize(
    "other",
    [["b"], ("a",), ["a", "a"], [["a"]], {"a"}, {"a": "a"}],
    ids=str,
)
def test_another_container_is_a_change(other: Any) -> None:
    module = Configured()
    module.config.names = other
    watch = ModuleWatch(module, {})
    assert watch.change() is None
    module.config.names = ["a"]
    assert watch.change() is not None


def _asks(module: nn.Module) -> Any:
    def asks(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        output.requires_grad_(True)

    return module.register_forward_hook(asks)


def test_checkpointing_that_is_turned_off_and_on_is_no_change() -> None:
    """TRL does so at each step around its reference: transformers adds a hook each time."""
    engine = make_engine()
    module: Any = engine.module

    def turned_on() -> None:
        module.handles = [_asks(module.norm)]
        module.checkpoints = functools.partial(checkpoint, use_reentrant=False)

    turned_on()
    captured(engine)
    before = counters.compiled()[0]
    for _ in range(3):
        turned_on()
        train(engine, 1)
        assert engine.capture.reason is None
    assert counters.compiled()[0] == before
    assert len(module.norm._forward_hooks) == 4
    # A handle that the watch has seen removes its own hook still.
    module.handles[0].remove()
    assert len(module.norm._forward_hooks) == 3


class Told(Residual):
    def forward(self, x: torch.Tensor, told: object) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


def test_a_list_that_holds_itself_is_an_input_of_traced_steps() -> None:
    engine, told = make_engine(Told()), list[object]()
    told.append(told)
    ((x,),) = batches(1)
    engine.train_batch(iter([(x, told)]))
    assert engine.capture.reason == "an input is a container that holds itself"
