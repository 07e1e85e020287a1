"""`"spmd": {"moments": ...}`: the dtype in which each state of an optimizer rests."""

import functools
import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import arrays, runtime
from spmdzero.config import load_config
from spmdzero.engine import plan_of
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.inspect import measure
from spmdzero.plan import Role
from tests.support import engines
from tests.support.contract import make_batch, make_model
from tests.support.engines import Squares

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

SHORT, LONG = 30, 500
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
BFLOAT16 = {"exp_avg": "bfloat16"}
LOW = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def trained(
    stage: int, moments: dict[str, str], *, steps: int
) -> tuple[spmdzero.Engine, list[float]]:
    engine = engines.start(
        make_model(layers=1),
        optimizer={"type": "AdamW", "params": ADAMW},
        gradient_clipping=0.0,
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        spmd={"moments": moments},
    )
    losses = [engines.one_call(engine, make_batch(step, 0)) for step in range(steps)]
    return engine, [loss.item() for loss in losses]


@functools.cache
def torchs(dtype: torch.dtype) -> list[float]:
    """The losses of torch's AdamW, whose `exp_avg` is rounded to `dtype` after each step."""
    model, threads = make_model(layers=1), torch.get_num_threads()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    # On a busy machine several threads wait for each other, a minute in all.
    torch.set_num_threads(1)
    for step in range(SHORT):
        optimizer.zero_grad()
        loss = model(*make_batch(step, 0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for state in optimizer.state.values():
            state["exp_avg"].copy_(state["exp_avg"].to(dtype))
    torch.set_num_threads(threads)
    return losses


def apart(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def bound(losses: list[float]) -> float:
    """How far losses of a bf16 `exp_avg` may be from fp32's.

    Rounding changes it by up to 1/512, 1/900 in the mean of squares, of which 0.9 is left in the
    next step: 1 / 900 / sqrt(1 - 0.9**2) = 0.26 % of an update. Were these errors all of one sign,
    the weights would be 0.26 % of the way behind, and the losses as much of what they have fallen.
    The weights are 58,000 and the signs random: a tenth of it.
    """
    return 0.00026 * (losses[0] - min(losses))


def held(engine: spmdzero.Engine, slot: str) -> dict[torch.dtype, int]:
    """Dtype -> bytes on one device of all tensors of a slot, of the live tensors."""
    # The places of a tensor's parts are known only after the step.
    runtime.wait()
    found: dict[torch.dtype, int] = {}
    for state in engine.optimizer.state.values():
        tensor = state.get(slot)
        if tensor is not None:
            size = math.prod(arrays.local_shapes(tensor)[0]) * tensor.element_size()
            found[tensor.dtype] = found.get(tensor.dtype, 0) + size
    return found


def assert_as_planned(engine: spmdzero.Engine) -> None:
    """Devices and hosts hold of all slots what the plan says."""
    found, planned = measure(engine), engine.plan.memory()
    assert found[Role.MOMENT] == planned[Role.MOMENT]
    assert found.on_host == planned.on_host
    assert found[Role.MOMENT] + dict(found.on_host).get(Role.MOMENT, 0) > 0


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_losses_are_torchs_with_a_mean_of_gradients_that_rests_in_bf16(stage: int) -> None:
    engine, losses = trained(stage, BFLOAT16, steps=SHORT)
    plain, rounded = torchs(torch.float32), torchs(torch.bfloat16)
    assert apart(losses, plain) < bound(plain)
    # What sums of another order leave is far less than what rounding does.
    assert apart(losses, rounded) < apart(losses, plain) / 3
    (mean,), (squares,) = held(engine, "exp_avg").items(), held(engine, "exp_avg_sq").items()
    assert (mean[0], squares[0]) == (torch.bfloat16, torch.float32)
    assert squares[1] == 2 * mean[1]
    assert mean[1] + squares[1] == engine.plan.memory()[Role.MOMENT]
    assert_as_planned(engine)
    assert engine.plan.compare().stages[stage] == engine.plan.memory()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_losses_of_500_steps_are_fp32s_within_what_rounding_explains(stage: int) -> None:
    _, plain = trained(stage, {}, steps=LONG)
    engine, losses = trained(stage, BFLOAT16, steps=LONG)
    assert 0 < apart(losses, plain) < bound(plain)
    assert losses[-1] < losses[0] / 4
    (mean,) = held(engine, "exp_avg")
    assert mean == torch.bfloat16


@pytest.mark.slow
def test_a_mean_of_squares_in_bf16_hardly_falls_as_the_line_in_the_log_says() -> None:
    means = []
    for moments in ({}, {"exp_avg_sq": "bfloat16"}):
        engine, _ = trained(2, moments, steps=LONG)
        named = engine.named_tensors().items()
        means.append(sum(t.float().sum().item() for n, t in named if n.startswith("exp_avg_sq")))
    # Training lowers the gradients, which only fp32 follows.
    assert means[1] > 1.05 * means[0]


def said(caplog: pytest.LogCaptureFixture, **more: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "spmdzero"):
        for _ in range(2):
            engines.start(Squares(64), **more)
    return [r.message for r in caplog.records if r.message.startswith("exp_avg_sq rests in bf16")]


def test_one_line_says_what_bf16_loses_of_a_mean_of_many_squares(
    caplog: pytest.LogCaptureFixture,
) -> None:
    low = {"bf16": {"enabled": True, **LOW}}
    (line,) = said(caplog, spmd={"moments": {"exp_avg_sq": "bf16"}})
    assert "with beta2 = 0.999 a training step moves it by 0.001 of the way" in line
    assert line.endswith('"spmd": {"moments": {"exp_avg_sq": "float32"}} keeps all digits')
    quick = {"type": "AdamW", "params": {"betas": [0.9, 0.99]}}
    assert said(caplog, optimizer=quick, spmd={"moments": {"exp_avg_sq": "bf16"}}) == []
    assert said(caplog, spmd={"moments": BFLOAT16}) == []
    assert said(caplog, **low, spmd={"moments": {"exp_avg_sq": "float32"}}) == []
    forget = {"type": "AdamW", "params": {"betas": [0.9, 0.998]}}
    assert len(said(caplog, optimizer=forget, **low)) == 1


@pytest.mark.parametrize(
    ("type_", "params", "name", "words"),
    [
        ("AdamW", {}, "mu", "AdamW keeps no state 'mu' for the elements of a parameter. It has "
         "exp_avg, exp_avg_sq."),
        ("Adam", {}, "exp_avgs", "Did you mean 'exp_avg'? It has exp_avg, exp_avg_sq."),
        ("SGD", {}, "exp_avg", "SGD keeps no state 'exp_avg' for the elements of a parameter. "
         "Leave it out."),
        ("SGD", {"momentum": 0.9}, "exp_avg", "It has momentum_buffer."),
        ("Muon", {}, "step", "It has momentum_buffer, exp_avg, exp_avg_sq."),
        ("AdamW8bit", {"min_8bit_size": 8}, "exp_avg", "AdamW8bit keeps it in 8 bits"),
        ("RMSprop", {"momentum": 0.9}, "exp_avg_sq", "It has square_avg, momentum_buffer."),
    ],
)  # fmt: skip
def test_a_state_that_the_optimizer_lacks_is_refused_with_those_that_it_has(
    type_: str, params: dict[str, Any], name: str, words: str
) -> None:
    config = engines.config(
        optimizer={"type": type_, "params": params}, spmd={"moments": {name: "bfloat16"}}
    )
    with pytest.raises(SpmdZeroConfigError) as caught:
        plan_of(load_config(config), nn.Linear(8, 8), devices=8)
    assert (caught.value.key, caught.value.value) == (f"spmd.moments.{name}", "bf16")
    assert words in str(caught.value)


class Signs(torch.optim.Optimizer):
    """A user's own, whose states a first step shows."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad, alpha=0.1)
                p.add_(mean.sign(), alpha=-group["lr"])


def test_a_users_own_optimizer_has_the_states_that_its_first_step_shows() -> None:
    def start(moments: dict[str, str]) -> spmdzero.Engine:
        config = engines.config(zero_allow_untested_optimizer=True, spmd={"moments": moments})
        model = Squares(64)
        return spmdzero.initialize(model=model, config=config, optimizer=Signs)[0]

    with pytest.raises(SpmdZeroConfigError, match="Signs keeps no state 'exp_avg'"):
        start(BFLOAT16)
    engine = start({"mean": "bfloat16"})
    for step in range(3):
        engines.three_calls(engine, torch.randn(8, 64, generator=torch.manual_seed(step)))
    assert set(held(engine, "mean")) == {torch.bfloat16}
    assert_as_planned(engine)


def test_muons_groups_have_each_their_own_states_dtype() -> None:
    engine = engines.start(
        make_model(layers=1),
        optimizer={"type": "Muon", "params": {}},
        spmd={"moments": {"momentum_buffer": "bfloat16", "exp_avg_sq": "bfloat16"}},
    )
    engines.one_call(engine, make_batch(0, 0))
    found = {slot: set(held(engine, slot)) for slot in engine.plan.moments}
    assert found == {
        "momentum_buffer": {torch.bfloat16},
        "exp_avg": {torch.float32},
        "exp_avg_sq": {torch.bfloat16},
    }
    assert_as_planned(engine)


def test_a_named_state_has_its_dtype_where_the_config_has_all_in_bf16() -> None:
    engine = engines.start(
        make_model(layers=1),
        bf16={"enabled": True, **LOW},
        spmd={"moments": {"exp_avg_sq": "float32"}},
    )
    engines.one_call(engine, make_batch(0, 0))
    found = [set(held(engine, slot)) for slot in ("exp_avg", "exp_avg_sq")]
    assert found == [{torch.bfloat16}, {torch.float32}]
    assert_as_planned(engine)


def test_host_memory_holds_as_much_of_each_state_as_the_plan_says() -> None:
    offloaded = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    engine = engines.start(
        make_model(layers=1), zero_optimization=offloaded, spmd={"moments": BFLOAT16}
    )
    for step in range(3):
        engines.one_call(engine, make_batch(step, 0))
    assert_as_planned(engine)
    assert bool(engine.plan.memory().on_host) == runtime.host_memory()
    assert set(held(engine, "exp_avg")) == {torch.bfloat16}
