"""Whoever ends a step, and however backward is called, the sum of gradients is torch's."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmdzero
from spmdzero import utils
from spmdzero.backend import current
from spmdzero.engine._programs import Compiled
from spmdzero.errors import SpmdZeroUsageError
from tests.support import engines
from tests.support.bounds import summed
from tests.support.engines import assert_trained_as, three_calls

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

ROWS, WIDTH = 16, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).pow(2).mean()


def batch(index: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))


def start(model: nn.Module | None = None, **more: Any) -> spmdzero.Engine:
    """Plain SGD, whose update is the gradient."""
    usual = {
        "train_micro_batch_size_per_gpu": ROWS // 8,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "spmd": {"min_shard_elements": 64},
    }
    return engines.start(model or Net(), **usual | more)


def expected(weights: dict[int, float]) -> nn.Module:
    """After torch's SGD on the sum over batches of weight x loss."""
    model = Net()
    sum(model(batch(index)) * weight for index, weight in weights.items()).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return model


def by_torch(engine: spmdzero.Engine, loss: torch.Tensor) -> None:
    loss.backward()


def by_scale(engine: spmdzero.Engine, loss: torch.Tensor) -> None:
    engine.scale(loss).backward()


@pytest.mark.parametrize("backward", [spmdzero.Engine.backward, by_torch, by_scale])
@pytest.mark.parametrize("stage", [1, 2])
def test_every_way_of_backward_averages_over_micro_batches(
    stage: int, backward: Callable[..., None]
) -> None:
    engine = start(gradient_accumulation_steps=2, zero_optimization={"stage": stage})
    for index in range(2):
        backward(engine, engine(batch(index)))
        engine.step()
    assert engine.global_steps == 1
    assert_trained_as(engine, expected({0: 0.5, 1: 0.5}))


def test_backward_twice_before_a_step_sums_gradients() -> None:
    # DeepSpeed's ZeRO-1/2 keeps the second only.
    engine = start()
    engine.backward(engine(batch(0)))
    engine.backward(3 * engine(batch(1)))
    engine.step()
    assert_trained_as(engine, expected({0: 1.0, 1: 3.0}))


def test_the_caller_sets_the_boundary() -> None:
    engine = start(gradient_accumulation_steps=2)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(batch(0)))
    assert not engine.is_gradient_accumulation_boundary()
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(batch(1)))
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (1, 1)
    assert_trained_as(engine, expected({0: 0.5, 1: 0.5}))


def test_without_managed_accumulation_nobody_sets_the_boundary() -> None:
    engine = start(gradient_accumulation_steps=2, managed_gradient_accumulation=False)
    with pytest.raises(SpmdZeroUsageError, match=r"each step\(\) is the boundary"):
        engine.set_gradient_accumulation_boundary(True)


def test_no_sync_reduces_once_for_all() -> None:
    engine = start(zero_optimization={"stage": 1})
    with spmdzero.record_ledgers(engine) as ledgers:
        with engine.no_sync():
            engine.backward(engine(batch(0)))
            with pytest.raises(SpmdZeroUsageError, match=r"step\(\) inside engine\.no_sync"):
                engine.step()
        engine.backward(engine(batch(1)))
        engine.step()
    assert_trained_as(engine, expected({0: 1.0, 1: 1.0}))
    reduced = sorted(c.tensor for c in ledgers.boundary.of_role("gradient"))
    assert reduced == sorted(name for name, _ in engine.module.named_parameters())


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_starts_anew_after_zero_grad(stage: int) -> None:
    engine = start(zero_optimization={"stage": stage})
    rounds = []
    for _ in range(2):
        norms, plain = [], Net()
        with engine.no_sync():
            for index in range(3):
                engine.backward(engine(batch(index)))
                plain(batch(index)).backward()
                # What is held back is read as the sum so far.
                sums = [utils.safe_get_full_grad(p).norm().item() for p in engine.parameters()]
                assert sums == summed([p.grad.norm().item() for p in plain.parameters()])
                norms += sums
        rounds.append(norms)
        engine.zero_grad()
    assert rounds[0] == rounds[1]
    assert (engine.micro_steps, engine.global_steps) == (0, 0)


@pytest.mark.parametrize("stage", [1, 2])
def test_coalesced_reduction_is_one_of_all_that_was_summed(stage: int) -> None:
    engine = start(gradient_accumulation_steps=2, zero_optimization={"stage": stage})
    engine.set_gradient_accumulation_boundary(False)
    with spmdzero.record_ledgers(engine) as ledgers:
        with engine.coalesce_grad_reduction():
            for index in range(4):
                engine.backward(engine(batch(index)))
        # The boundary is still the caller's.
        assert not engine.is_gradient_accumulation_boundary()
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
    assert engine.global_steps == 1
    assert_trained_as(engine, expected(dict.fromkeys(range(4), 0.5)))
    reduced = sorted(c.tensor for c in ledgers.boundary.of_role("gradient"))
    assert reduced == sorted(name for name, _ in engine.module.named_parameters())


def _passes(engine: spmdzero.Engine, count: int, *, inside: bool, reads: bool = False) -> None:
    """A step of so many backward passes, all but the last in `no_sync`."""
    for index in range(count):
        last = index == count - 1
        with engine.no_sync() if inside and not last else contextlib.nullcontext():
            engine.backward(engine(batch(index)))
            if reads:
                assert engine.module.second.bias.grad is not None
                engine.module.second.bias.grad.item()
    engine.step()


@pytest.mark.parametrize(
    ("inside", "reads"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_more_backward_passes_are_no_other_programs(inside: bool, reads: bool) -> None:
    engine = start(zero_optimization={"stage": 1})
    for count in (6, 6, 7):
        _passes(engine, count, inside=inside, reads=reads)
    # A copy on the devices is a program too.
    weights, before = copy.deepcopy(engine.module).cpu(), Compiled.so_far().count
    _passes(engine, 17, inside=inside, reads=reads)
    assert Compiled.so_far().count == before
    sum(weights(batch(index)) for index in range(17)).backward()
    torch.optim.SGD(weights.parameters(), 0.1).step()
    # A sum of 17 gradients, in another order.
    assert_trained_as(engine, weights, rtol=1e-4, atol=1e-5)


def test_no_sync_is_refused_where_gradients_are_shards() -> None:
    with pytest.raises(SpmdZeroUsageError, match="stage 2"), start().no_sync():
        pass


@pytest.mark.parametrize("first", [1, 2])
def test_the_train_batch_size_changes_the_micro_batches_of_a_step(first: int) -> None:
    engine = start(gradient_accumulation_steps=first)
    three_calls(engine, *map(batch, range(first)))
    engine.module.load_state_dict(Net().state_dict())
    engine.set_train_batch_size(3 * ROWS)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (3 * ROWS, 3)
    three_calls(engine, *map(batch, range(3)))
    assert (engine.global_steps, engine.micro_steps) == (2, first + 3)
    assert_trained_as(engine, expected(dict.fromkeys(range(3), 1 / 3)))
    with pytest.raises(SpmdZeroUsageError, match="must be divisible"):
        engine.set_train_batch_size(3 * ROWS + 1)


def test_the_micro_batch_size_changes_the_rows() -> None:
    engine = start()
    engine.set_train_micro_batch_size(4)
    three_calls(engine, torch.cat([batch(0), batch(1)]))
    assert (engine.train_batch_size(), engine.global_samples) == (32, 32)
    # The loss is a mean over rows, so that two batches are half of each.
    assert_trained_as(engine, expected({0: 0.5, 1: 0.5}))


def test_fp16_refuses_a_backward_that_is_not_scaled() -> None:
    # The loss is fp16 here, and can't hold DeepSpeed's first scale of 2 ** 16.
    fp16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 4}
    engine = start(fp16=fp16)
    with pytest.raises(SpmdZeroUsageError, match=r"engine\.scale\(loss\)"):
        engine(batch(0)).backward()
    engine.scale(engine(batch(0))).backward()
    engine.step()
    assert engine.was_step_applied()


def test_a_plain_backward_through_checkpointed_activations_trains_or_is_refused() -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.first, x, use_reentrant=False)
            return self.second(hidden.relu()).pow(2).mean()

    # A folded forward has all that its backward runs again; a traced one runs it in the region.
    if current().compiler is not None:
        folded = start(Checkpointed())
        folded(batch(0)).backward()
        folded.step()
        assert_trained_as(folded, expected({0: 1.0}))
    traced = start(Checkpointed(), spmd={"capture": False})
    with pytest.raises(SpmdZeroUsageError, match=r"engine\.backward\(loss\)"):
        traced(batch(0)).backward()
    traced.zero_grad()
    three_calls(traced, batch(0))
    assert_trained_as(traced, expected({0: 1.0}))


def test_two_engines_train_a_gan_as_torch_does() -> None:
    torch.manual_seed(0)
    make_g = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, WIDTH))
    make_d = nn.Sequential(nn.Linear(WIDTH, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    generator, critic = copy.deepcopy(make_g), copy.deepcopy(make_d)
    g_steps, d_steps = (torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic))
    g, d = start(make_g), start(make_d)

    def losses(g: Any, d: Any, real: torch.Tensor, noise: torch.Tensor) -> Iterator[torch.Tensor]:
        """The critic's, and, when that one has made its step, the generator's."""
        fake = g(noise)
        yield F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
        yield F.softplus(-d(fake)).mean()

    for step in range(3):
        data = batch(step), batch(step + 10)[:, :8]
        theirs = losses(generator, critic, *data)
        ours = losses(g, d, *data)
        for engine, optimizer in ((d, d_steps), (g, g_steps)):
            loss, expected_loss = next(ours), next(theirs)
            engine.backward(loss)
            engine.step()
            optimizer.zero_grad()
            expected_loss.backward()
            optimizer.step()
            assert loss.item() == summed(expected_loss.item())
        d.zero_grad()  # as with torch's optimizers: g's backward went through d
    assert_trained_as(g, generator)
