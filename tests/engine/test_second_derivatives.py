"""`create_graph=True` through an engine: second derivatives are those of plain torch."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import spmdzero
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.nn import linear_cross_entropy
from tests.support.engines import start
from tests.support.rows import marks_of

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

ROWS, LENGTH, WIDTH = 16, 4, 8
X = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
# fp32 has 7 digits, of which the second derivatives of some blocks, summed over rows in another
# order than torch's, lose three.
EXACT = 1e-4
Penalty = Callable[..., torch.Tensor]


def penalty(gradient: torch.Tensor) -> torch.Tensor:
    """WGAN-GP's, of a critic whose gradient for each row is to be of length 1."""
    return (gradient.flatten(1).norm(dim=1) - 1).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.line(self.norm(x)))


class Critic(nn.Module):
    """`[rows, length, width]` -> a number for each row."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)
        self.checkpoints = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).sum((1, 2))


class Penalized(Critic):
    """The penalty is part of its loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        scores = super().forward(x)
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores.square().mean() + penalty(gradient)


class Checkpointing(Penalized):
    def __init__(self) -> None:
        super().__init__()
        self.checkpoints = True


class Attending(Penalized):
    """Query, key and value are computed of one another."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        query = self.blocks[0](x).unflatten(-1, (2, -1)).transpose(1, 2)
        key = query.tanh()
        out = F.scaled_dot_product_attention(query, key, key.sin(), is_causal=True)
        return self.blocks[1](out.transpose(1, 2).flatten(2))


class FusedLoss(Penalized):
    """A classifier, whose loss makes its gradients in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)
        self.loss_of = linear_cross_entropy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        labels = torch.arange(LENGTH, device=x.device).remainder(5).expand(len(x), LENGTH)
        bias = self.head.bias
        loss = linear_cross_entropy(self.body(x), self.head.weight, labels, bias=bias)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + penalty(gradient * x.numel())


class PlainLoss(FusedLoss):
    """What it computes, in torch's words."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        labels = torch.arange(LENGTH, device=x.device).remainder(5).expand(len(x), LENGTH)
        loss = F.cross_entropy(self.head(self.body(x)).flatten(0, 1), labels.flatten())
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + penalty(gradient * x.numel())


def on_input(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Around the model, of its input."""
    x = x.detach().requires_grad_()
    scores = model(x)
    (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return scores.square().mean() + penalty(gradient)


def on_parameters(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Around the model, of its parameters."""
    loss = model(x).square().mean()
    found = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    return loss + sum(g.square().sum() for g in found)


def third(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A gradient of a gradient of a gradient."""
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().mean()


def returned(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The model's own loss."""
    return model(x)


def gradients_of_torch(model: nn.Module, way: Penalty, x: torch.Tensor = X) -> list[torch.Tensor]:
    model.zero_grad()
    # The CPU's fused attention has no second derivative.
    with sdpa_kernel(SDPBackend.MATH):
        way(model, x).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def difference(engine: spmdzero.Engine, expected: list[torch.Tensor]) -> float:
    """Of all gradients, relative to the largest number."""
    # One program computes them all.
    found = [g.float().flatten() for p in engine.module.parameters() if (g := p.grad) is not None]
    ours, theirs = torch.cat(found).cpu(), torch.cat([e.flatten() for e in expected])
    return float((ours - theirs).abs().max() / theirs.abs().max())


def of_replicas(model: nn.Module) -> Penalty:
    """A loss of the model's own is the mean of those that each device has of its rows."""

    def mean(_: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([model(rows) for rows in x.chunk(8)]).mean()

    return mean


class LongCritic(Critic):
    """Of as many equal blocks as a loop has at least."""

    def __init__(self) -> None:
        super().__init__(4)


class LongPenalized(Penalized):
    def __init__(self) -> None:
        super().__init__(4)


CASES: dict[str, tuple[type[Critic], Penalty, dict[str, Any]]] = {
    "around the region": (Critic, on_input, {}),
    "around the whole batch": (Critic, on_input, {"forward": "global"}),
    "of parameters": (Critic, on_parameters, {"capture": False}),
    "of parameters of the whole batch": (Critic, on_parameters, {"forward": "global"}),
    "third": (Critic, third, {}),
    "around a loop": (LongCritic, on_input, {"scan": "on"}),
    "around attention by kernels": (Attending, returned, {"attention": "kernel"}),
    "third of the whole batch": (Critic, third, {"forward": "global"}),
    "inside": (Penalized, returned, {}),
    "inside of the whole batch": (Penalized, returned, {"forward": "global"}),
    "inside, with blocks that run again": (Penalized, returned, {"recompute": "everything"}),
    "inside, with products kept": (Penalized, returned, {"recompute": "dots"}),
    "inside, of a loop": (LongPenalized, returned, {"scan": "on"}),
    "inside, checkpointing": (Checkpointing, returned, {}),
    "inside, of a fused loss": (FusedLoss, returned, {}),
    "inside, not captured": (LongPenalized, returned, {"capture": False, "scan": "on"}),
}
# In `make test`; the others are what they are combined of.
QUICK = {
    "around the region",
    "around attention by kernels",
    "inside, of a loop",
    "inside, of a fused loss",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=marks_of(spmd, slow=case not in QUICK))
        for case, (*_, spmd) in CASES.items()
    ],
)
def test_gradients_of_a_gradient_are_those_of_torch(case: str) -> None:
    make, way, spmd = CASES[case]
    model = make()
    plain = PlainLoss() if make is FusedLoss else copy.deepcopy(model)
    plain.load_state_dict(model.state_dict())
    inside = way is returned and spmd.get("forward") != "global"
    engine = start(model, train_micro_batch_size_per_gpu=2, spmd=spmd)
    loss = way(engine, X.to(engine.device))
    engine.backward(loss)
    expected = gradients_of_torch(plain, of_replicas(plain) if inside else way)
    assert difference(engine, expected) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("forward", ["region", "global"])
def test_they_are_in_half_precision_too(dtype: str, forward: str) -> None:
    model = Critic()
    engine = start(
        model,
        train_micro_batch_size_per_gpu=2,
        spmd={"forward": forward},
        # A scale that the penalty's gradients stand without an overflow.
        **{dtype: {"enabled": True} | ({"initial_scale_power": 4} if dtype == "fp16" else {})},
    )
    x = X.to(getattr(torch, "bfloat16" if dtype == "bf16" else "float16"))
    expected = gradients_of_torch(copy.deepcopy(Critic()).float(), on_input)
    engine.backward(on_input(engine, x.to(engine.device)))
    # bf16 has 8 bits, fp16 has 11, and the second derivative is computed in a dozen steps.
    assert difference(engine, expected) < (0.1 if dtype == "bf16" else 0.02)


def test_a_gradient_that_is_asked_for_is_no_micro_batch() -> None:
    model = Critic()
    plain = copy.deepcopy(model)
    engine = start(model, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2,
                   spmd={"capture": False})  # fmt: skip
    x, xd = (t.detach().requires_grad_() for t in (X, X.to(engine.device)))
    ways = engine.module.head.weight, xd
    found = torch.autograd.grad(engine(xd).square().mean(), ways)
    expected = torch.autograd.grad(plain(x).square().mean(), (plain.head.weight, x))
    for ours, theirs in zip(found, expected, strict=True):
        # It is not divided by the micro-batches of a step.
        torch.testing.assert_close(ours.cpu(), theirs, rtol=EXACT, atol=EXACT * float(theirs.max()))
    assert engine.module.head.weight.grad is None


@pytest.mark.parametrize("spmd", [{}, {"capture": False}, {"forward": "global"}],
                         ids=["captured", "traced", "global"])  # fmt: skip
def test_a_grad_that_is_to_be_differentiated_is_refused(spmd: dict[str, Any]) -> None:
    engine = start(Critic(), train_micro_batch_size_per_gpu=2, spmd=spmd)
    with pytest.raises(SpmdZeroUsageError, match=r"create_graph=True.*torch\.autograd\.grad"):
        engine(X).square().mean().backward(create_graph=True)


def test_a_captured_forward_says_that_it_has_no_gradients_of_parameters() -> None:
    engine = start(Critic(), train_micro_batch_size_per_gpu=2)
    parameters = [*engine.module.parameters()]
    for asked in (parameters, parameters[:1], parameters[1:], parameters[-1:]):
        for allow_unused in (False, True):
            loss = engine(X).square().mean()
            with pytest.raises(SpmdZeroUsageError, match='"capture": false'):
                torch.autograd.grad(loss, asked, allow_unused=allow_unused)
    for asked in (parameters[:1], parameters[-1:]):
        with pytest.raises(SpmdZeroUsageError, match='"capture": false'):
            engine(X).square().mean().backward(inputs=asked)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": torch.func.grad,
    "vmap": lambda engine: torch.func.vmap(engine, in_dims=1),
    "jacrev": torch.func.jacrev,
    "jvp": lambda engine: lambda x: torch.func.jvp(engine, (x,), (x,)),
}


# As torch 2.14 warns itself where the first dual number is made.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_engine_inside_of_torch_func_says_what_to_do(name: str) -> None:
    engine = start(Critic(), train_micro_batch_size_per_gpu=2)
    for x in (X, X.to(engine.device)):
        with pytest.raises(SpmdZeroUsageError, match=r"torch\.func.*Take torch\.autograd\.grad"):
            TRANSFORMS[name](engine)(x)


class PerRow(Critic):
    """Gradients of each row, by torch.func inside of a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.blocks[0], parameters, (row,)).square().sum()

        parameters = dict(self.blocks[0].named_parameters())
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        return sum((g.square().mean() for g in found.values()), torch.zeros((), device=x.device))


@pytest.mark.slow
def test_torch_func_inside_of_a_forward_is_torchs() -> None:
    model = PerRow()
    plain = copy.deepcopy(model)
    engine = start(model, train_micro_batch_size_per_gpu=2)
    engine.backward(engine(X))
    expected = gradients_of_torch(plain, of_replicas(plain))
    assert difference(engine, expected) < EXACT


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_a_captured_step_has_the_penalty_of_its_forward() -> None:
    losses = []
    for capture in (True, False):
        spmd = {"capture": capture, "scan": "on", "recompute": "nothing"}
        engine = start(LongPenalized(), train_micro_batch_size_per_gpu=2, spmd=spmd)
        losses.append([engine.train_batch(X).item() for _ in range(5)])
    captured, traced = losses
    # The same operations, compiled together or apart.
    assert captured == pytest.approx(traced, rel=EXACT)
    assert captured[-1] < captured[0]
