"""Optimizers over 8 devices against the same arithmetic on whole tensors on the CPU."""

import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import counters
from spmdzero.inspect import Collective, measure
from spmdzero.optim import FusedLamb, FusedLion
from spmdzero.plan import Role
from tests.support import engines
from tests.support.engines import assert_trained_as, three_calls
from tests.support.optimizers import lamb_step, lion_step, muon_step
from tests.support.selected import outside

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

STEPS = 4
Params = list[nn.Parameter]
Step = Callable[[Params, int, float], None]


class Model(nn.Module):
    """Sharded on a dim, flat with padding, flat without, and a vector of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.odd, self.tall = nn.Linear(5, 24), nn.Linear(24, 7), nn.Linear(7, 33)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.odd(self.wide(x).tanh()).tanh()
        return (self.tall(hidden) - 1.0).pow(2).mean() + hidden.pow(3).mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 5, generator=torch.Generator().manual_seed(step))


def config(optimizer: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    named = {} if optimizer is None else {"optimizer": optimizer}
    return named | {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "spmd": {"min_shard_elements": 1},
    } | more  # fmt: skip


def lr_of(step: int, lr: float) -> float:
    return lr * (1.0, 0.3, 0.7, 1.7)[step]


def train_sharded(
    cfg: dict[str, Any], lr: float, client: Any = None, made: Callable[[], nn.Module] = Model
) -> tuple[spmdzero.Engine, list[int]]:
    engine, *_ = spmdzero.initialize(model=made(), config=cfg, optimizer=client)
    compiled = []
    for step in range(STEPS):
        for group in engine.optimizer.param_groups:
            group["lr"] = lr_of(step, lr)
        three_calls(engine, batch(step)).item()
        compiled.append(counters.compiled()[0])
    return engine, compiled


def train_whole(step_of: Step, lr: float, made: Callable[[], nn.Module] = Model) -> nn.Module:
    model = made()
    for step in range(STEPS):
        model.zero_grad()
        model(batch(step)).backward()
        with torch.no_grad():
            step_of(list(model.parameters()), step + 1, lr_of(step, lr))
    return model


def torch_step(cls: type[torch.optim.Optimizer], **kwargs: Any) -> Step:
    made: list[torch.optim.Optimizer] = []

    def step(params: Params, count: int, lr: float) -> None:
        if count == 1:
            made[:] = [cls(params, **kwargs)]  # type: ignore[call-arg]
        made[0].param_groups[0]["lr"] = lr
        made[0].step()

    return step


class SignSGD(torch.optim.Optimizer):
    """A user's own, in the style of most: numbers as alpha, a counter as a Python number."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.9})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["mean"].mul_(group["decay"]).add_(p.grad, alpha=1 - group["decay"])
                unbiased = state["mean"] / (1 - group["decay"] ** state["step"])
                p.add_(unbiased.tanh() + p.grad.sign(), alpha=-group["lr"])


class Subclass(torch.optim.AdamW):
    """Not AdamW itself, so nothing is known of its arithmetic."""


ADAGRAD = {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}
LAMB = {"weight_decay": 0.1, "betas": [0.8, 0.95]}
RMSPROP = {"alpha": 0.9, "momentum": 0.9, "centered": True, "weight_decay": 0.1}
O = torch.optim  # noqa: E741

# name -> lr, optimizer of the config, client optimizer, the same on whole tensors
CASES: dict[str, tuple[float, Any, Any, Step]] = {
    "Adagrad": (0.1, ("Adagrad", ADAGRAD), None, torch_step(O.Adagrad, **ADAGRAD)),
    "Lion": (0.01, ("Lion", {"weight_decay": 0.1}), None, lion_step(0.9, 0.999, 0.1)),
    "FusedLion client": (
        0.01, None, lambda p: FusedLion(p, weight_decay=0.1), lion_step(0.9, 0.999, 0.1),
    ),
    "Lamb": (0.01, ("Lamb", LAMB), None, lamb_step(0.8, 0.95, 1e-8, 0.1)),
    "FusedLamb client": (0.01, None, FusedLamb, lamb_step(0.9, 0.999, 1e-8, 0.0)),
    "Muon gram": (
        0.02, ("Muon", {"weight_decay": 0.1}), None, muon_step(0.95, 0.1, torch.float32),
    ),
    "RMSprop": (0.01, ("RMSprop", RMSPROP), None, torch_step(O.RMSprop, **RMSPROP)),
    "Adamax": (0.01, ("Adamax", {}), None, torch_step(O.Adamax)),
    "NAdam": (0.01, ("NAdam", {}), None, torch_step(O.NAdam)),
    "RAdam": (0.01, ("RAdam", {}), None, torch_step(O.RAdam)),
    "ASGD": (0.01, ("ASGD", {}), None, torch_step(O.ASGD)),
    "Rprop": (0.01, ("Rprop", {}), None, torch_step(O.Rprop)),
    "Adadelta": (1.0, ("Adadelta", {}), None, torch_step(O.Adadelta)),
    "subclass, amsgrad": (
        0.01, None, lambda p: Subclass(p, amsgrad=True), torch_step(O.AdamW, amsgrad=True),
    ),
    "user's own": (0.01, None, SignSGD, torch_step(SignSGD)),
}  # fmt: skip


# A rule of elements, one of whole tensors, one of matrices, instances of DeepSpeed's, of torch's
# and of a user's; tests/unit compares each rule with its original.
QUICK = ("Adagrad", "FusedLamb client", "Muon gram", "subclass, amsgrad", "user's own")


@pytest.mark.parametrize("name", [pytest.param(n, marks=outside(QUICK, n)) for n in CASES])
def test_shards_are_updated_as_the_whole_and_a_new_lr_compiles_nothing(name: str) -> None:
    lr, named, client, step_of = CASES[name]
    optimizer = None if named is None else {"type": named[0], "params": named[1]}
    engine, compiled = train_sharded(config(optimizer), lr, client)
    # fp32 rounding of the gradients, which differ by summation order, over 4 steps.
    assert_trained_as(engine, train_whole(step_of, lr), rtol=0, atol=2e-5)
    assert compiled[1:] == [compiled[1]] * (STEPS - 1)


class Attention(nn.Module):
    """Four heads for queries and two for keys, of six rows each, and one matrix for both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=6)
        self.q_proj, self.k_proj = nn.Linear(5, 24), nn.Linear(5, 12)
        self.o_proj = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (self.q_proj(x) * self.k_proj(x).repeat(1, 2)).tanh()
        return (self.o_proj(mixed) - 1.0).pow(2).mean() + mixed.pow(3).mean()


@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.slow), 3])
def test_each_attention_head_is_a_matrix_of_its_own_to_muon(stage: int) -> None:
    params = {"weight_decay": 0.1, "per_head_muon": True}
    cfg = config({"type": "Muon", "params": params}, zero_optimization={"stage": stage})
    engine, _ = train_sharded(cfg, 0.02, made=Attention)
    by_heads = muon_step(0.95, 0.1, torch.float32, heads={0: 4, 2: 2})
    expected = train_whole(by_heads, 0.02, Attention)
    # As above; taken whole, queries' and keys' weights are 0.04 away from it.
    assert_trained_as(engine, expected, rtol=0, atol=2e-5)


def test_muon_groups_halve_by_name_and_dims_and_the_memory_is_what_the_plan_says() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.Embed_in, self.body = nn.Linear(8, 16), nn.Linear(16, 16)
            self.lm_head = nn.Linear(16, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.body(self.Embed_in(x)).tanh()).pow(2).mean()

    params = {"lr": 0.1, "adam_lr": 0.2, "weight_decay": 0.3, "momentum": 0.8}
    engine, optimizer, *_ = spmdzero.initialize(
        model=Names(), config=config({"type": "Muon", "params": params})
    )
    names = {p: name for name, p in engine.module.named_parameters()}
    muon, adam = optimizer.param_groups
    assert [names[p] for p in muon["params"]] == ["body.weight"]
    assert {k: muon[k] for k in muon if k != "params"} == {
        "lr": 0.1, "momentum": 0.8, "weight_decay": 0.3, "ns_method": "gram", "use_muon": True,
        "name": "muon-params",
    }  # fmt: skip
    assert (adam["lr"], adam["betas"], adam["eps"]) == (0.2, (0.9, 0.95), 1e-10)
    assert engine.get_mom() == [0.0, (0.9, 0.95)]
    assert set(optimizer.state[muon["params"][0]]) == {"momentum_buffer"}
    planned = engine.plan.memory()
    measured = measure(engine)
    assert measured[Role.MOMENT] == planned[Role.MOMENT] > 0


def beside_gradients(type_: str, **params: Any) -> list[Collective]:
    """The collectives of one step that serve no gradient."""
    named = {"type": type_, "params": params}
    engine, *_ = spmdzero.initialize(model=Model(), config=config(named))
    with spmdzero.record_ledgers(engine) as ledgers:
        three_calls(engine, batch(0))
    return [c for c in ledgers.boundary.collectives if c.role != "gradient"]


def tensors(collectives: list[Collective], role: str) -> list[tuple[str, str, tuple[int, ...]]]:
    return sorted((c.tensor, c.kind, c.shape) for c in collectives if c.role == role)


@pytest.fixture(scope="module")
def adamw() -> list[Collective]:
    return beside_gradients("AdamW")


@pytest.mark.parametrize(
    "type_", ["Lion", *(pytest.param(t, marks=pytest.mark.slow) for t in ("Adagrad", "RMSprop"))]
)
def test_an_elementwise_rule_costs_no_collective_that_adamw_does_not(
    adamw: list[Collective], type_: str
) -> None:
    assert Counter((c.role, c.tensor, c.kind, c.shape) for c in beside_gradients(type_)) == Counter(
        (c.role, c.tensor, c.kind, c.shape) for c in adamw
    )


def test_lamb_costs_two_scalars_for_each_parameter(adamw: list[Collective]) -> None:
    found = beside_gradients("Lamb")
    names = sorted(n for n, _ in Model().named_parameters())
    assert tensors(found, "update") == [(n, "all-reduce", ()) for n in names for _ in range(2)]
    assert len(found) == len(adamw) + 2 * len(names)


def test_muon_costs_one_gather_of_each_matrix(adamw: list[Collective]) -> None:
    found = beside_gradients("Muon", ns_method="standard")
    assert tensors(found, "direction") == [
        ("odd.weight", "all-gather", (7, 24)),
        ("tall.weight", "all-gather", (232,)),  # 33 x 7, padded to a multiple of 8
        ("wide.weight", "all-gather", (24, 5)),
    ]
    assert len(found) == len(adamw) + 3


def test_zero_refuses_an_optimizer_that_deepspeed_does_not_test() -> None:
    cfg = config({"type": "Lamb"}, zero_allow_untested_optimizer=False)
    with pytest.raises(spmdzero.SpmdZeroConfigError, match="DeepSpeed tests with ZeRO") as caught:
        spmdzero.initialize(model=Model(), config=cfg)
    assert caught.value.key == "zero_allow_untested_optimizer"
    spmdzero.initialize(model=Model(), config=cfg | {"zero_optimization": {"stage": 0}})


def test_norm_and_clipping_see_muons_orthogonalised_update() -> None:
    engine, *_ = spmdzero.initialize(
        model=Model(),
        config=config({"type": "Muon", "params": {"adam_lr": 0.0}}, gradient_clipping=1.0),
    )
    before = {n: p.detach().cpu().clone() for n, p in engine.module.named_parameters()}
    three_calls(engine, batch(0))
    moved = [p.detach().cpu() - before[n] for n, p in engine.module.named_parameters()]
    length = math.sqrt(sum(float(m.square().sum()) for m in moved))
    norm = engine.get_global_grad_norm()
    # 3 matrices with 5 or 7 singular values near 1, one of them scaled up by its shape.
    assert norm is not None
    assert norm > 4
    # What is not Muon's shares the norm but not the move; its gradients are far smaller.
    assert length == pytest.approx(0.02, rel=0.02)


def test_what_a_planned_optimizer_cant_do_is_refused() -> None:
    _, optimizer, *_ = spmdzero.initialize(model=nn.Linear(4, 4), config=engines.config())
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="no place in the sharding plan"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="calls no closure"):
        optimizer.step(lambda: torch.zeros(()))


@pytest.mark.parametrize("change", [list.pop, lambda groups: groups.append(groups[0])])
def test_a_group_that_came_or_went_by_hand_is_refused(
    change: Callable[[list[dict[str, Any]]], object],
) -> None:
    engine, optimizer, *_ = spmdzero.initialize(model=nn.Linear(4, 4), config=engines.config())
    change(optimizer.param_groups)
    with pytest.raises(spmdzero.SpmdZeroUsageError, match="had 1 entries after initialize and has"):
        engine(torch.ones(8, 4))


def test_what_an_optimizer_given_to_initialize_has_no_states_for_is_refused() -> None:
    model = nn.Linear(4, 4)
    client = torch.optim.AdamW(model.parameters(), lr=0.1)
    fresh = client.state_dict()
    schedule = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 0.5**step)
    engine, optimizer, *_ = spmdzero.initialize(
        model=model, config=config(None), optimizer=client, lr_scheduler=schedule
    )
    engine.backward(engine(torch.ones(16, 4)).mean())
    before = [parameter.detach().cpu() for parameter in model.parameters()]
    # Its own update would come on top of the engine's, from states that no plan shards.
    refusals: dict[str, Callable[[], object]] = {
        r"engine\.step\(\)": client.step,
        r"engine\.optimizer\.state_dict\(\)": client.state_dict,
        r"engine\.optimizer\.load_state_dict\(\.\.\.\)": lambda: client.load_state_dict(fresh),
    }
    for instead, refused in refusals.items():
        with pytest.raises(spmdzero.SpmdZeroUsageError, match=instead):
            refused()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().cpu(), value)
    engine.step()
    # What both share still reaches both.
    assert [o.param_groups[0]["lr"] for o in (client, optimizer)] == [0.05, 0.05]
