import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdzero.backend import Mesh, runtime
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.optim import (
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
    LocalTensor,
    Terms,
    TorchElementwise,
    is_tested,
    rules_from_torch,
)
from spmdzero.optim._first_step import FirstStepApart
from tests.support.bounds import rounded

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

Change = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]


class Own(torch.optim.Optimizer):
    """A user's optimizer with a given arithmetic."""

    def __init__(self, params: Any, change: Change, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.change = change

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * self.change(p, p.grad, self.state[p]))


def sign(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    return grad.sign()


def counted(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    state["count"] = state.get("count", 0) + 1
    return grad / (1 + state["count"])


def normalised(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    return grad / grad.norm()


def sorted_(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    return grad.flatten().sort().values.reshape(grad.shape)


def by_dims(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    return grad + 0.1 * param if param.dim() > 1 else grad


def root_on_the_host(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    state["count"] = state.get("count", 0) + 1
    return grad / math.sqrt(state["count"])


def from_the_gradient(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    if "mean" not in state:
        state["mean"] = grad.clone()
    return state["mean"].mul_(0.9).add_(grad)


def by_first_step(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    """As ADOPT: a counter on the CPU, and a first step that moves nothing."""
    first = not state
    if first:
        state["step"], state["square"] = torch.tensor(0.0), torch.zeros_like(grad)
    state["step"] += 1
    if first:
        state["square"].addcmul_(grad, grad)
        return torch.zeros_like(grad)
    assert isinstance(state["step"], Tensor)
    step = state["step"].item()
    normed = grad / state["square"].sqrt().clamp(min=1e-6)
    clip = (step - 1) ** 0.33
    state["square"].mul_(0.9).addcmul_(grad, grad, value=0.1 / math.sqrt(step))
    return normed.clamp(-clip, clip)


def from_the_parameter(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    """As MADGRAD: it goes on from where the parameter was."""
    if not state:
        state["step"], state["start"], state["sum"] = 0, param.clone(), torch.zeros_like(param)
    state["step"] += 1
    state["sum"].add_(grad, alpha=math.sqrt(state["step"]))
    return (param - state["start"] + state["sum"] / state["step"]) / (1 - 0.9 ** state["step"])


def choosing(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    state["count"] = state.get("count", 0) + 1
    return grad / (2.0 if math.fmod(state["count"], 3) == 0 else 1.0)


def choosing_late(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    state.setdefault("count", 0)
    state["count"] += 1
    return grad if state["count"] < 5 else grad.sign()


def rows(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    state.setdefault("rows", torch.zeros(grad.shape[0]))
    return grad


def noisy(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    return grad + torch.randn_like(grad)


def crashing(param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
    return state["missing"]


def rule_of(optimizer: torch.optim.Optimizer) -> Any:
    return rules_from_torch(optimizer, device=runtime.device())[0]


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(4, 4))]


@pytest.mark.parametrize("change", [sign, counted])
def test_a_users_elementwise_optimizer_is_accepted(mesh: Mesh, change: Change) -> None:
    rule = rule_of(Own(weights(), change))
    assert isinstance(rule, TorchElementwise)
    assert rule.slots == ()
    assert rule.scalars == (("count",) if change is counted else ())


@pytest.mark.parametrize(
    ("change", "slots"),
    [
        (root_on_the_host, ()),
        (from_the_gradient, ("mean",)),
        (by_first_step, ("square",)),
        (from_the_parameter, ("start", "sum")),
    ],
)
def test_one_whose_first_step_is_another_or_whose_numbers_are_pythons_is_accepted(
    mesh: Mesh, change: Change, slots: tuple[str, ...]
) -> None:
    rule = rule_of(Own(weights(), change))
    assert isinstance(rule, FirstStepApart)
    assert rule.slots == slots
    assert rule.scalars == ("step",)
    assert math.sqrt(4) == 2.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (normalised, "elements of a parameter change each other"),
        (sorted_, "elements of a parameter change each other"),
        (by_dims, "or its shape does"),
        (noisy, "elements of a parameter change each other"),
        (choosing, "to choose by it what it computes"),
        (choosing_late, "chooses by its count of steps"),
        (rows, r"'rows' of a \[6, 4\] parameter is \[6\]"),
        (crashing, "KeyError: 'missing'"),
    ],
)
def test_what_is_not_elementwise_is_refused_with_the_reason(
    mesh: Mesh, change: Change, reason: str
) -> None:
    with pytest.raises(SpmdZeroConfigError, match=reason) as caught:
        rule_of(Own(weights(), change))
    assert caught.value.key == "optimizer"
    assert "Own" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LBFGS", "several times in one step"),
        ("SparseAdam", "sparse gradients"),
        ("Muon", "whole matrices"),
    ],
)
def test_a_torch_class_that_is_not_elementwise_says_what_to_use(name: str, reason: str) -> None:
    with pytest.raises(SpmdZeroConfigError, match=reason):
        rule_of(getattr(torch.optim, name)(weights()))


def test_each_group_has_its_own_rule_and_start(mesh: Mesh) -> None:
    groups = [{"params": weights(), "lr": lr} for lr in (0.1, 0.25)]
    rules = rules_from_torch(torch.optim.Rprop(groups), device=runtime.device())
    starts = [rule.initial("step_size", {}) for rule in rules]
    assert starts == rounded([0.1, 0.25])


def test_a_group_that_changes_its_kind_is_refused_at_the_next_step(mesh: Mesh) -> None:
    optimizer = torch.optim.RMSprop(weights())
    rule = rule_of(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.param_groups[0]["capturable"] = True
    param = torch.ones(3, device=runtime.device())
    state = {"square_avg": param * 1, "step": torch.ones((), device=runtime.device())}
    with pytest.raises(SpmdZeroUsageError, match="momentum_buffer"):
        rule.update(param, param, state, Terms(factors={}, whole=LocalTensor(shape=(3,))))


@pytest.mark.parametrize(
    "cls", [DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam, FusedLamb, FusedLion]
)
def test_deepspeeds_classes_step_in_the_engine_only(cls: type[torch.optim.Optimizer]) -> None:
    (weight,) = weights()
    optimizer = cls([weight])  # type: ignore[call-arg]
    optimizer.step()
    weight.grad = torch.ones(4, 4)
    with pytest.raises(SpmdZeroUsageError, match=r"initialize\(optimizer"):
        optimizer.step()


def test_a_class_of_deepspeed_is_the_rule_of_that_name() -> None:
    cpu = torch.device("cpu")
    first = rules_from_torch(FusedAdam(weights(), adam_w_mode=False), device=cpu)[0]
    assert first == rules_from_torch(torch.optim.Adam(weights()), device=cpu)[0]
    on_cpu = DeepSpeedCPUAdam(weights(), adamw_mode=False)
    assert rules_from_torch(on_cpu, device=cpu)[0] == first
    raw = FusedAdam(weights(), bias_correction=False)
    assert rules_from_torch(raw, device=cpu)[0].bias_correction is False
    for refused in (FusedAdam(weights(), amsgrad=True), FusedLamb(weights(), max_grad_norm=1.0)):
        with pytest.raises(SpmdZeroConfigError, match="the sharded update has no"):
            rules_from_torch(refused, device=cpu)


@pytest.mark.parametrize(
    ("optimizer", "tested"),
    [
        ("AdamW", True), ("adagrad", True), ("LION", True), ("muon", True), ("SGD", False),
        ("Lamb", False), ("RMSprop", False),
        (torch.optim.Adam(weights()), True), (torch.optim.SGD(weights()), False),
        (FusedAdam(weights()), True), (FusedLamb(weights()), False),
        (DeepSpeedCPUAdam(weights()), True), (DeepSpeedCPULion(weights()), True),
    ],
)  # fmt: skip
def test_deepspeed_tests_these_with_zero(optimizer: Any, tested: bool) -> None:
    assert is_tested(optimizer) is tested
