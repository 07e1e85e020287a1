"""Draws of the devices' own generator: outside of the replica region, and in a global forward."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmdzero
from spmdzero.backend import Mesh, counters, runtime
from spmdzero.errors import SpmdZeroRuntimeError
from tests.support.engines import one_call, three_calls

COUNT, WIDTH = 1 << 15, 64
DEVICE = torch.device("xla", 0)
# name -> (so many numbers, mean, variance)
DRAWS: dict[str, tuple[Callable[[], torch.Tensor], float, float]] = {
    "rand": (lambda: torch.rand(COUNT, device=DEVICE), 1 / 2, 1 / 12),
    "rand_like": (lambda: torch.rand_like(zeros()), 1 / 2, 1 / 12),
    "randn": (lambda: torch.randn(COUNT, device="xla"), 0, 1),
    "randint": (lambda: torch.randint(5, 15, (COUNT,), device=DEVICE).float(), 9.5, 99 / 12),
    "normal": (lambda: torch.normal(2.0, 3.0, (COUNT,), device=DEVICE), 2, 9),
    "normal, tensors": (lambda: torch.normal(zeros() + 2, zeros() + 3), 2, 9),
    "normal_": (lambda: zeros().normal_(2, 3), 2, 9),
    "normal_ of a part": (lambda: torch.cat([zeros().reshape(2, -1)[1].normal_()] * 2), 0, 1),
    "uniform_": (lambda: zeros().uniform_(-1, 3), 1, 16 / 12),
    "random_": (lambda: zeros().random_(10), 4.5, 99 / 12),
    "exponential_": (lambda: zeros().exponential_(2.0), 1 / 2, 1 / 4),
    "bernoulli": (lambda: torch.bernoulli(zeros() + 0.3), 0.3, 0.21),
    "bernoulli_": (lambda: zeros().bernoulli_(0.3), 0.3, 0.21),
    "dropout": (lambda: F.dropout(zeros() + 1, 0.2), 1, 0.25),
    "distribution": (lambda: torch.distributions.Normal(zeros() + 2, 3.0).sample(), 2, 9),
    "init": (lambda: nn.init.trunc_normal_(zeros(), 1.0, 0.01, 0.0, 2.0), 1, 0.0001),
}


def zeros() -> torch.Tensor:
    return torch.zeros(COUNT, device=DEVICE)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_has_its_distribution_and_its_seed(mesh: Mesh, name: str) -> None:
    function, mean, variance = DRAWS[name]
    runtime.seed(1)
    one, two = function().cpu().double(), function().cpu().double()
    runtime.seed(1)
    again = function().cpu().double()
    runtime.seed(2)
    other = function().cpu().double()
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    assert not torch.equal(one, other)
    for values in (one, two, other):
        assert abs(values.mean() - mean) < 6 * math.sqrt(2 * variance / COUNT)
        assert abs(values.var() - variance) < 0.1 * variance


def test_a_permutation_and_a_choice_have_each_element_once(mesh: Mesh) -> None:
    assert torch.equal(torch.randperm(100, device=DEVICE).cpu().sort().values, torch.arange(100))
    chosen = torch.multinomial(torch.ones(50, device=DEVICE), 50).cpu()
    assert torch.equal(chosen.sort().values, torch.arange(50))


def test_draws_of_one_program_differ(mesh: Mesh) -> None:
    drawn = torch.stack([torch.rand(WIDTH, device=DEVICE) for _ in range(5)]).cpu()
    assert len({tuple(row) for row in drawn.tolist()}) == 5


def test_a_new_draw_is_no_new_program(mesh: Mesh) -> None:
    first, _ = torch.rand(WIDTH + 1, device=DEVICE).cpu(), runtime.sync()
    compiled = counters.compiled()[0]
    for _ in range(3):
        assert not torch.equal(first, torch.rand(WIDTH + 1, device=DEVICE).cpu())
    assert counters.compiled()[0] == compiled


def test_the_state_continues_where_it_was_read(mesh: Mesh) -> None:
    torch.rand(4, device=DEVICE)
    state = runtime.generator_state()
    drawn = torch.rand(WIDTH, device=DEVICE).cpu()
    torch.rand(WIDTH, device=DEVICE).cpu()
    runtime.seed(state)
    assert torch.equal(torch.rand(WIDTH, device=DEVICE).cpu(), drawn)


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: torch.poisson(zeros()), "aten.poisson.default draws random numbers in a way"),
        (lambda: zeros().bernoulli_(1.5), "the probability 1.5 is not in"),
        (lambda: torch.randint(3, 3, (2,), device=DEVICE), "test_draws.py"),
    ],
)
def test_what_is_not_drawn_is_refused_at_the_users_line(
    mesh: Mesh, draw: Callable[[], torch.Tensor], said: str
) -> None:
    with pytest.raises(SpmdZeroRuntimeError, match=said):
        draw()


class Masked(nn.Module):
    """What is left of ones after a dropout that its backward may run again."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return F.dropout((x * self.weight).square(), 0.5)

        if self.recomputes:
            return checkpoint(inner, x, use_reentrant=False).sum()
        return inner(x).sum()


def engine_of(model: nn.Module, *, capture: bool, lr: float = 0.0) -> spmdzero.Engine:
    engine, *_ = spmdzero.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": lr}},
            "spmd": {"forward": "global", "capture": capture},
        },
    )
    return engine


@pytest.mark.parametrize("recomputes", [False, True], ids=["plain", "checkpointed"])
def test_a_global_forward_masks_and_its_gradient_has_the_mask(recomputes: bool) -> None:
    engine = engine_of(Masked(recomputes), capture=False)
    x = torch.zeros(8, WIDTH)
    x[0] = 1.0
    seen = []
    for _ in range(3):
        loss = engine(x)
        engine.backward(loss)
        gradient = spmdzero.utils.safe_get_full_grad(engine.module.weight).cpu()
        engine.step()
        # Of the one row of ones each element is kept, and doubled, or isn't: its gradient is 4.
        assert set(gradient.tolist()) <= {0.0, 4.0}
        assert gradient.sum() == 2 * loss.item()
        seen.append(tuple(gradient.tolist()))
    assert len(set(seen)) == 3


@pytest.mark.parametrize("recomputes", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("calls", [False, True], ids=["train_batch", "three calls"])
def test_replayed_steps_draw_the_traced_ones_masks_each_another(
    recomputes: bool, calls: bool
) -> None:
    losses = []
    for capture in (False, True):
        engine = engine_of(Masked(recomputes), capture=capture)
        runtime.seed(5)
        run = three_calls if calls else one_call
        losses.append([run(engine, torch.eye(8, WIDTH)).item() for _ in range(8)])
    assert engine.capture.replayed > 2
    assert engine.capture.ends.repeated > 2
    assert losses[0] == losses[1]
    assert len(set(losses[0])) > 2


class Noisy(torch.autograd.Function):
    """Adds noise to the gradient."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        (grad,) = grads
        return grad + torch.rand_like(grad)


class Moved(nn.Module):
    """A weight that moves by its gradient's noise, before a mask or not."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = Noisy.apply(x * self.weight)  # type: ignore[bad-assignment]
        return F.dropout(moved, self.rate, self.rate > 0).sum()


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_what_only_a_backward_of_a_global_forward_draws_is_drawn_after_it(rate: float) -> None:
    weights = []
    for capture in (False, True):
        engine = engine_of(Moved(rate), capture=capture, lr=0.1)
        runtime.seed(5)
        for _ in range(6):
            three_calls(engine, torch.eye(8, WIDTH))
        weights.append(engine.module.weight.detach().cpu())
    # The same draws, in programs that XLA may round otherwise.
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)
    assert len(set(weights[0].tolist())) > 4
