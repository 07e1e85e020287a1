"""Gradient checkpointing: the forward that backward recomputes is the forward that ran."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from region_harness import ROWS, Probe, assert_same_sums, numbers, torch_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from spmdzero import checkpointing
from spmdzero.backend import Mesh, runtime
from spmdzero.compat.tensor_fragment import safe_get_full_grad
from tests.support.engines import start
from tests.support.rows import marks_of

pytestmark = pytest.mark.backends("jax", "torch_xla")


class Block(nn.Module):
    """Without checkpointing when `reentrant` is None."""

    def __init__(self, reentrant: bool | None, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.reentrant, self.dropout, self.calls = reentrant, dropout, 0

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.down(F.dropout(F.gelu(self.up(x)), self.dropout, self.training))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Residual(nn.Module):
    def __init__(self, reentrant: bool | None = None, dropout: float = 0.5) -> None:
        super().__init__()
        self.first, self.second = Block(reentrant, dropout), Block(reentrant, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x)) - x).square().mean()


def train_once(
    mesh: Mesh, state: dict[str, torch.Tensor], reentrant: bool | None, dropout: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """The loss, the gradients, and how often the inner forward ran."""
    module = Residual(reentrant, dropout)
    module.load_state_dict(state)
    probe = Probe(module, mesh)
    batch = probe.batch(numbers(ROWS, 16))
    # The reentrant kind wants an input that requires a gradient.
    batch.tensor.requires_grad_()
    torch.manual_seed(5)
    loss = probe(batch)
    probe.backward(loss)
    return loss.detach().cpu(), probe.gradients, probe.module.first.calls


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_equal_those_without_checkpointing_under_the_same_seed(
    mesh: Mesh, reentrant: bool, dropout: float
) -> None:
    torch.manual_seed(0)
    state = Residual().state_dict()
    loss, gradients, calls = train_once(mesh, state, None, dropout)
    again, recomputed, calls_again = train_once(mesh, state, reentrant, dropout)
    assert (calls, calls_again) == (1, 2)
    assert_same_sums(again, loss)
    assert_same_sums(recomputed, gradients)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradients_equal_torchs_own(mesh: Mesh, reentrant: bool) -> None:
    torch.manual_seed(0)
    module = Residual(None, 0.0)
    _, gradients, _ = train_once(mesh, module.state_dict(), reentrant, 0.0)
    assert_same_sums(gradients, torch_gradients(module, module(numbers(ROWS, 16))))


# The names of the arguments of torch's checkpoint, and of the functions that hand a call on here.
OF_TORCH = ["use_reentrant", "context_fn", "determinism_check", "debug", "early_stop"]
NAMES = [*OF_TORCH, "preserve_rng_state", "fn", "function", "call", "module", "args", "kwargs", "y"]


class Scaled(nn.Module):
    """Multiplies by each number that it is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor, **scales: float) -> torch.Tensor:
        for name in NAMES:
            x = x * scales[name]
        return x * self.weight


class Scales(nn.Module):
    def __init__(self, around: bool) -> None:
        super().__init__()
        self.blocks, self.around = nn.ModuleList(Scaled() for _ in range(3)), around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {name: 2.0 if number % 2 else 0.5 for number, name in enumerate(NAMES, 1)}
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x, **given) if self.around else block(x, **given)
        return x.mean()


@pytest.mark.parametrize(
    "spmd",
    [
        {},
        {"recompute": "everything"},
        {"recompute": "dots"},
        pytest.param({"scan": "on"}, marks=pytest.mark.backends("jax")),
    ],
    ids=["a call", "everything", "dots", "a loop"],
)
def test_a_keyword_argument_reaches_the_function_whatever_its_name(spmd: dict[str, str]) -> None:
    model = Scales(around=not spmd)
    engine = start(model, train_micro_batch_size_per_gpu=1, spmd=spmd)
    loss = engine(torch.ones(8, 16))
    engine.backward(loss)
    # An odd number of names: 2.0 remains of each of three blocks.
    assert loss.item() == 2.0**3
    (gradient,) = {*safe_get_full_grad(model.blocks[0].weight).tolist()}
    assert gradient == 2.0**3 / 16


class Forks(nn.Module):
    """Draws its dropout from a named random state, as Megatron's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            return x + F.dropout(torch.tanh(x) * self.weight, 0.5)


class ForkedBlocks(nn.Module):
    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList(Forks() for _ in range(3)), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return x.square().mean()


def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


# How blocks are run, and what the config says.
FORKED: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]] = {
    "a trace of each step": (call, {"capture": False}),
    "three calls": (call, {}),
    "checkpoint": (checkpointing.checkpoint, {}),
    "checkpoint without arguments": (lambda f, x: checkpointing.checkpoint(lambda: f(x)), {}),
    "torch's checkpoint": (functools.partial(checkpoint, use_reentrant=False), {}),
    "torch's reentrant one": (functools.partial(checkpoint, use_reentrant=True), {}),
    "everything": (call, {"recompute": "everything"}),
    "dots": (call, {"recompute": "dots"}),
    "a loop": (call, {"scan": "on"}),
    "a loop that computes again": (call, {"scan": "on", "recompute": "everything"}),
}


QUICK_FORKS = {"checkpoint", "torch's checkpoint", "everything", "a loop"}


def trained_with_forks(way: str) -> list[torch.Tensor]:
    """The losses of two steps, and the gradients of each."""
    run, spmd = FORKED[way]
    checkpointing.model_parallel_cuda_manual_seed(7)
    engine = start(ForkedBlocks(run), train_micro_batch_size_per_gpu=1, spmd=spmd)
    found = []
    for step in range(2):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        # The reentrant kind wants an input that requires a gradient, of which no step is folded.
        loss = engine(x.requires_grad_("reentrant" in way))
        engine.backward(loss)
        gradients = [safe_get_full_grad(block.weight) for block in engine.module.blocks]
        found += [loss.detach().cpu(), *(grad.cpu() for grad in gradients if grad is not None)]
        engine.step()
    return found


@pytest.fixture(scope="module")
def forked() -> list[torch.Tensor]:
    return trained_with_forks("a trace of each step")


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=marks_of(spmd, slow=way not in QUICK_FORKS))
        for way, (_, spmd) in FORKED.items()
        if way != "a trace of each step"
    ],
)
def test_a_named_random_state_draws_the_same_in_both_runs(
    forked: list[torch.Tensor], way: str
) -> None:
    assert len(forked) == 2 * 4
    # XLA fuses other operations, and rounds fp32 elsewhere.
    torch.testing.assert_close(trained_with_forks(way), forked, rtol=1e-5, atol=1e-7)


def test_another_seed_drops_other_elements(mesh: Mesh) -> None:
    torch.manual_seed(0)
    probe = Probe(Residual(False), mesh)
    losses = []
    for seed in (5, 6, 5):
        torch.manual_seed(seed)
        loss = probe(probe.batch(numbers(ROWS, 16)))
        probe.backward(loss)
        losses.append(loss.item())
    assert losses[0] == losses[2] != losses[1]


def test_backward_outside_of_the_regions_context_is_not_needed_without_checkpointing(
    mesh: Mesh,
) -> None:
    torch.manual_seed(0)
    module = Residual(None, 0.0)
    probe = Probe(module, mesh)
    probe(probe.batch(numbers(ROWS, 16))).backward()
    runtime.sync()
    assert_same_sums(probe.gradients, torch_gradients(module, module(numbers(ROWS, 16))))


def test_a_plain_backward_runs_a_reentrant_checkpoint_again_in_the_region(mesh: Mesh) -> None:
    torch.manual_seed(0)
    state = Residual().state_dict()
    loss, gradients, _ = train_once(mesh, state, None, 0.5)
    module = Residual(True, 0.5)
    module.load_state_dict(state)
    probe = Probe(module, mesh)
    batch = probe.batch(numbers(ROWS, 16))
    batch.tensor.requires_grad_()
    torch.manual_seed(5)
    again = probe(batch)
    again.backward()
    runtime.sync()
    assert probe.module.first.calls == 2
    # Its dropout masks are those of its forward.
    assert_same_sums(again.detach().cpu(), loss)
    assert_same_sums(probe.gradients, gradients)
