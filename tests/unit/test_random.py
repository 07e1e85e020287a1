"""Random numbers inside the replica region: independent, repeatable, and rightly distributed."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from region_harness import ROWS, Apply, Probe, run
from torch import nn

from spmdzero.backend import Mesh
from spmdzero.backend.replica import ReplicaRandom
from spmdzero.errors import ReplicaRegionError

pytestmark = pytest.mark.backends("jax", "torch_xla")

WIDTH = 2048  # a replica draws 2 x WIDTH numbers
COUNT = ROWS * WIDTH
ZEROS = torch.zeros(ROWS, WIDTH)
Function = Callable[[torch.Tensor], torch.Tensor]
Draws = dict[str, list[torch.Tensor]]


def like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


# name -> (draws for rows of zeros, mean, variance)
DRAWS: dict[str, tuple[Function, float, float]] = {
    "rand": (lambda x: torch.rand(x.shape, device=x.device), 1 / 2, 1 / 12),
    "rand_like": (torch.rand_like, 1 / 2, 1 / 12),
    "uniform_": (lambda x: like(x).uniform_(-1, 3), 1, 16 / 12),
    "randn": (lambda x: torch.randn(x.shape, device=x.device), 0, 1),
    "randn_like": (torch.randn_like, 0, 1),
    "normal_": (lambda x: like(x).normal_(2, 3), 2, 9),
    "normal, tensor mean": (lambda x: torch.normal(x + 2, 3.0), 2, 9),
    "normal, tensor std": (lambda x: torch.normal(2.0, x + 3), 2, 9),
    "normal, two tensors": (lambda x: torch.normal(x + 2, x + 3), 2, 9),
    "normal, size": (lambda x: torch.normal(2.0, 3.0, x.shape, device=x.device), 2, 9),
    "exponential_": (lambda x: like(x).exponential_(2.0), 1 / 2, 1 / 4),
    "randint": (lambda x: torch.randint(10, x.shape, device=x.device).float(), 4.5, 99 / 12),
    "randint, low": (
        lambda x: torch.randint(5, 15, x.shape, device=x.device).float(),
        9.5,
        99 / 12,
    ),
    "randint_like": (lambda x: torch.randint_like(x, 10), 4.5, 99 / 12),
    "randint_like, low": (lambda x: torch.randint_like(x, 5, 15), 9.5, 99 / 12),
    "random_": (lambda x: like(x).random_(10), 4.5, 99 / 12),
    "random_, low": (lambda x: like(x).random_(5, 15), 9.5, 99 / 12),
    "bernoulli": (lambda x: torch.bernoulli(x + 0.3), 0.3, 0.21),
    "bernoulli, p": (lambda x: torch.bernoulli(x, 0.3), 0.3, 0.21),
    "bernoulli_": (lambda x: like(x).bernoulli_(0.3), 0.3, 0.21),
    "dropout": (lambda x: F.dropout(x + 1, 0.2), 1, 0.25),
    "rrelu": (lambda x: F.rrelu(x - 1, 0.0, 1.0, training=True), -1 / 2, 1 / 12),
    "multinomial": (
        lambda x: torch.multinomial(x[:, :3] + 1, x.shape[1], replacement=True).float(),
        1,
        2 / 3,
    ),
    "gumbel_softmax": (
        lambda x: F.gumbel_softmax(x.reshape(2, -1, 2), hard=True)[..., 0],
        0.5,
        0.25,
    ),
}


@pytest.fixture(scope="module")
def draws(mesh: Mesh) -> Draws:
    """name -> the numbers `[8, 2 x width]` of two calls and, seeded again, of the first."""
    result = {}
    for name, (function, _, _) in DRAWS.items():
        torch.manual_seed(11)
        first, second = run(function, mesh, ZEROS), run(function, mesh, ZEROS)
        torch.manual_seed(11)
        again = run(function, mesh, ZEROS)
        result[name] = [t.reshape(8, -1).double() for t in (first, second, again)]
    return result


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of independent numbers, in standard deviations: 1 / sqrt(n)."""
    pair = torch.stack([one.flatten(), other.flatten()])
    return (torch.corrcoef(pair)[0, 1].abs() * math.sqrt(one.numel())).item()


def test_replicas_and_calls_draw_independent_numbers_that_a_seed_repeats(draws: Draws) -> None:
    for name, (first, second, again) in draws.items():
        correlations = torch.corrcoef(first)[torch.triu(torch.ones(8, 8), 1) == 1]
        assert correlations.abs().max() < 5 / math.sqrt(first.shape[1]), name
        assert correlation(first, second) < 5, name
        assert torch.equal(first, again), name
        assert not torch.equal(first, second), name


def test_both_backends_draw_the_numbers_of_the_same_hash_on_the_cpu(draws: Draws) -> None:
    for replica, drawn in enumerate(draws["rand"][0]):
        number = torch.tensor([replica], dtype=torch.int32)
        torch.manual_seed(11)
        here = ReplicaRandom(number, lambda key: torch.tensor(key, dtype=torch.int32))
        assert torch.equal(here.uniform(torch.Size([2 * WIDTH])).double(), drawn)


def test_mean_and_variance_are_the_distributions(draws: Draws) -> None:
    for name, (_, mean, variance) in DRAWS.items():
        values = torch.cat(draws[name][:2]).flatten()
        n = values.numel()
        assert abs(values.mean().item() - mean) < 5 * math.sqrt(variance / n), name
        # Squared distances from the true mean, less the squared error of the sample's own mean.
        spread = 5 * math.sqrt(((values - mean) ** 2).var().item() / n) + 25 * variance / n
        assert abs(values.var().item() - variance) < spread, name


QUANTILES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda v: v,
    "uniform_": lambda v: (v + 1) / 4,
    "randn": torch.special.ndtr,
    "normal_": lambda v: torch.special.ndtr((v - 2) / 3),
    "exponential_": lambda v: 1 - torch.exp(-2 * v),
}


def test_the_whole_distribution_is_right(draws: Draws) -> None:
    for name, quantile in QUANTILES.items():
        values = torch.cat(draws[name][:2]).flatten().sort().values
        n = values.numel()
        expected = (torch.arange(n) + 0.5) / n
        # Kolmogorov and Smirnov: the largest gap exceeds 2.5 / sqrt(n) once in 130,000 draws.
        assert (quantile(values) - expected).abs().max() < 2.5 / math.sqrt(n), name


def test_every_integer_comes_equally_often(draws: Draws) -> None:
    ten = range(10)
    integers = {"randint": ten, "randint, low": range(5, 15), "random_": ten}
    for name, possible in (integers | {"multinomial": range(3)}).items():
        values = torch.cat(draws[name][:2]).flatten()
        classes, counts = values.unique(return_counts=True)
        assert classes.tolist() == list(possible), name
        expected = values.numel() / len(possible)
        assert (counts - expected).abs().max() < 5 * math.sqrt(expected), name


def test_neighbours_are_uncorrelated(draws: Draws) -> None:
    values = draws["rand"][0]
    for lag in (1, 2, 8, 64):
        assert correlation(values[:, :-lag], values[:, lag:]) < 5


def test_two_seeds_give_independent_numbers(mesh: Mesh) -> None:
    values = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        values.append(run(torch.rand_like, mesh, ZEROS))
    assert correlation(*values) < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_stay_below_1_in_every_dtype(mesh: Mesh, dtype: torch.dtype) -> None:
    values = run(lambda x: torch.rand_like(x, dtype=dtype), mesh, ZEROS)
    assert values.dtype == dtype
    assert values.max() < 1
    assert values.min() >= 0
    assert values.max() > 0.99


def test_bf16_normal_numbers_are_finite_and_standard(mesh: Mesh) -> None:
    values = run(lambda x: torch.randn_like(x, dtype=torch.bfloat16), mesh, ZEROS).double()
    assert values.isfinite().all()
    assert abs(values.mean().item()) < 5 / math.sqrt(COUNT)
    # Rounding to bf16 adds at most (2^-9)^2 of the variance, far below the 5 sigma of sampling.
    assert abs(values.var().item() - 1) < 5 * math.sqrt(2 / COUNT)


# -- what is drawn is a valid draw ---------------------------------------------------------


def test_dropout_scales_what_it_keeps_and_its_gradient_alike(mesh: Mesh) -> None:
    probe = Probe(nn.Dropout(0.25), mesh)
    batch = probe.batch(ZEROS + 3)
    batch.tensor.requires_grad_()
    output = probe(batch)
    probe.backward(output.sum())
    values = output.detach().cpu()
    assert values.unique().tolist() == [0.0, 4.0]
    assert batch.tensor.grad is not None
    assert torch.equal(batch.tensor.grad.cpu(), values / 3)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(mesh: Mesh, p: float) -> None:
    x = torch.arange(ROWS * 4.0).reshape(ROWS, 4)
    assert torch.equal(run(lambda x: F.dropout(x, p), mesh, x), x * (1 - p))


def test_alpha_and_channel_dropout_drop(mesh: Mesh) -> None:
    x = torch.ones(ROWS, 64, 4)
    channels = run(lambda x: F.dropout1d(x, 0.5), mesh, x)
    assert set(channels.sum(-1).unique().tolist()) == {0.0, 8.0}
    alpha = run(lambda x: F.alpha_dropout(x, 0.5, training=True), mesh, x)
    assert len(alpha.unique()) == 2


def test_attention_dropout_differs_between_replicas(mesh: Mesh) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.reshape(2, 1, 8, 8)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).flatten(1)

    same_rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).repeat(8, 1)
    values = run(attend, mesh, same_rows).reshape(8, -1)
    assert len(values.unique(dim=0)) == 8


def test_multinomial_without_replacement_has_no_duplicates(mesh: Mesh) -> None:
    values = run(lambda x: torch.multinomial(x + 1, 12), mesh, torch.zeros(ROWS, 16))
    assert values.shape == (ROWS, 12)
    assert all(len(set(row)) == 12 for row in values.tolist())
    assert set(values.flatten().tolist()) <= set(range(16))


@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial_never_draws_a_weight_of_zero_and_follows_the_others(
    mesh: Mesh, replacement: bool
) -> None:
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0])

    def draw(x: torch.Tensor) -> torch.Tensor:
        rows = weights.to(x.device).expand(2 * 512, 4)
        return torch.multinomial(rows, 1, replacement=replacement).reshape(2, 512)

    values = run(draw, mesh, ZEROS)
    assert set(values.flatten().tolist()) == {1, 2}
    n = values.numel()
    assert abs((values == 2).double().mean().item() - 0.75) < 5 * math.sqrt(0.75 * 0.25 / n)


def test_randperm_is_a_permutation_of_its_own_on_each_replica(mesh: Mesh) -> None:
    values = run(lambda x: torch.randperm(40, device=x.device)[None].repeat(2, 1), mesh, ZEROS)
    rows = values[::2].tolist()
    assert all(sorted(row) == list(range(40)) for row in rows)
    assert len({tuple(row) for row in rows}) == 8


@pytest.mark.parametrize("span", [2**45 + 2**44, 2**62])
def test_integers_of_a_wide_range_reach_its_upper_half(mesh: Mesh, span: int) -> None:
    def upper(x: torch.Tensor) -> torch.Tensor:
        draws = torch.randint(0, span, (2, 4096), device=x.device)
        return ((draws >= span // 2).float(), (draws >= span // 4 * 3).float())

    probe = Probe(Apply(upper), mesh)
    half, quarter = probe(probe.batch(torch.zeros(ROWS, 1)))
    n = half.numel()
    # 5 sigma of a binomial.
    assert abs(half.cpu().mean().item() - 0.5) < 5 * (0.25 / n) ** 0.5
    assert abs(quarter.cpu().mean().item() - 0.25) < 5 * (0.1875 / n) ** 0.5


# -- what is refused -------------------------------------------------------------------------


REFUSED: dict[str, tuple[Function, str]] = {
    "normal_": (lambda x: like(x).normal_(generator=torch.Generator()), "torch.manual_seed"),
    "bernoulli": (
        lambda x: torch.bernoulli(x + 0.5, generator=torch.Generator()), "torch.manual_seed",
    ),
    "uniform_": (lambda x: like(x).uniform_(generator=torch.Generator()), "torch.manual_seed"),
    "poisson": (torch.poisson, "does not know how to make them differ"),
    "cauchy_": (lambda x: like(x).cauchy_(), "does not know how to make them differ"),
}  # fmt: skip


def test_a_generator_and_an_unknown_random_operation_are_refused(mesh: Mesh) -> None:
    for name, (function, says) in REFUSED.items():
        with pytest.raises(ReplicaRegionError) as caught:
            run(function, mesh, ZEROS)
        assert says in str(caught.value), name


def test_drawing_on_the_cpu_is_left_to_torch(mesh: Mesh) -> None:
    torch.manual_seed(5)
    values = run(lambda x: x + torch.rand(WIDTH).to(x.device), mesh, ZEROS)
    torch.manual_seed(5)
    assert torch.equal(values, torch.rand(WIDTH).expand(ROWS, -1))


def test_a_module_shared_by_two_calls_draws_anew(mesh: Mesh) -> None:
    dropout = nn.Dropout(0.5)
    probe = Probe(Apply(lambda x: dropout(x) + 10 * dropout(x)), mesh)
    with torch.no_grad():
        values = probe(probe.batch(ZEROS + 1)).cpu()
    assert set(values.unique().tolist()) == {0.0, 2.0, 20.0, 22.0}
