"""A GAN of two engines that reads values between `backward` and `step`."""

import itertools
import re
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmdzero
from spmdzero.backend import Mesh, arrays, counters, current, programs
from tests.engine.captured import ROWS, assert_same, batches, make_engine, state

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

NOISE, WIDTH = 12, 20


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(NOISE, 24),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(24, WIDTH),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(WIDTH, 24),
            nn.LeakyReLU(0.2),
            nn.Linear(24, 28),
            nn.BatchNorm1d(28),
            nn.LeakyReLU(0.2),
            nn.Linear(28, 1),
        )


Engines = tuple[spmdzero.Engine, spmdzero.Engine]


def engines(*, capture: bool) -> Engines:
    torch.manual_seed(0)
    modules = Generator(), Discriminator()
    generator, discriminator = (make_engine(module, capture=capture) for module in modules)
    return generator, discriminator


def half_a_step(gan: Engines, index: int) -> tuple[torch.Tensor, list[float]]:
    """The discriminator's step, as PyTorch's DCGAN example has it: the fakes, and what it reads."""
    generator, discriminator = gan
    source = torch.Generator().manual_seed(index)
    discriminator.zero_grad()
    real = discriminator(torch.randn(ROWS, WIDTH, generator=source))
    loss = F.softplus(-real).mean()
    discriminator.backward(loss)
    read = [real.mean().item()]
    fakes = generator(torch.randn(ROWS, NOISE, generator=source))
    fake = discriminator(fakes.detach())
    other = F.softplus(fake).mean()
    discriminator.backward(other)
    read.append(fake.mean().item())
    discriminator.step()
    return fakes, [*read, (loss + other).item()]


def other_half(gan: Engines, fakes: torch.Tensor) -> list[float]:
    """The generator's step up to its end."""
    generator, discriminator = gan
    generator.zero_grad()
    judged = discriminator(fakes)
    loss = F.softplus(-judged).mean()
    generator.backward(loss)
    return [judged.mean().item(), loss.item()]


def train(gan: Engines, steps: int) -> Iterator[list[float]]:
    for index in range(steps):
        fakes, read = half_a_step(gan, index)
        read += other_half(gan, fakes)
        gan[0].step()
        yield read


@pytest.mark.backends("jax")
def test_a_gan_compiles_each_of_its_programs_once(mesh: Mesh) -> None:
    gan = engines(capture=True)
    counts = [counters.compiled()[0]]
    counts += [counters.compiled()[0] for _ in train(gan, 4)]
    made = [after - before for before, after in itertools.pairwise(counts)]
    # Three values that are read before their step ends, a loss after each of two, and two steps.
    # On JAX two of them are one.
    assert made == [6 if current().name == "jax" else 7, 0, 0, 0]
    assert gan[0].capture.traced == 0


def test_folded_engines_that_take_turns_are_traced_ones_bit_for_bit(mesh: Mesh) -> None:
    found = []
    for capture in (False, True):
        gan = engines(capture=capture)
        torch.manual_seed(3)
        found.append(([*train(gan, 4)], [state(engine) for engine in gan]))
    (read, states), (its_read, its_states) = found
    assert read == its_read
    for mine, its in zip(states, its_states, strict=True):
        for name, tensor in mine.items():
            assert torch.equal(tensor, its[name]), name


# JAX's XLA fuses the products of matrices that are this small.
PRODUCT = r" dot\(" if current().name == "torch_xla" else r" (?:dot|fusion)\("


def test_a_forward_is_not_run_again_after_another_engines_step(mesh: Mesh) -> None:
    products = []
    for capture in (False, True):
        gan = engines(capture=capture)
        assert len([*train(gan, 1)]) == 1
        fakes, _ = half_a_step(gan, 1)
        other_half(gan, fakes)
        gan[0].optimizer.folds.wanted = gan[0].capture.before_update()
        gan[0].optimizer.step()
        tensors = [*gan[0].named_tensors().values(), gan[0].optimizer.grad_norm]
        pending = [t for t, p in zip(tensors, arrays.are_pending(tensors), strict=True) if p]
        products.append(len(re.findall(PRODUCT, programs.optimized_hlo(pending))))
    assert products[0] == products[1] > 0


@pytest.mark.backends("jax")
def test_what_is_kept_for_a_backward_that_never_comes_is_let_go_of(mesh: Mesh) -> None:
    gan = engines(capture=True)
    for index in range(3):
        fakes, _ = half_a_step(gan, index)
        del fakes
    assert gan[0].capture.replayed + gan[0].capture.compared == 3
    with pytest.raises(spmdzero.errors.SpmdZeroUsageError, match=r"before engine\.backward"):
        gan[0].step()


@pytest.mark.backends("jax")
def test_another_engines_whole_step_is_replayed_between_a_forward_and_its_backward(
    mesh: Mesh,
) -> None:
    found = []
    for capture in (False, True):
        one, other = make_engine(capture=capture), make_engine(capture=capture)
        losses = []
        for (x,) in batches(6):
            loss = one(x)
            losses.append(other.train_batch(iter([(x,)])).item())
            one.backward(loss)
            one.step()
            losses.append(loss.item())
        found.append((losses, state(one), state(other)))
    assert_same(found[0], found[1])
    assert one.capture.traced == 0
    assert other.capture.replayed > 0
