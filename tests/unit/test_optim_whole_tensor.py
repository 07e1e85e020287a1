"""Muon's orthogonalisation and LAMB's trust ratio, away from devices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdzero.optim import Lamb, LocalTensor, Muon, Terms
from spmdzero.optim._muon import aspect_scale, orthogonalize
from tests.support.bounds import assert_rounded
from tests.support.optimizers import lamb_step, newton_schulz

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), seed=st.integers(0, 99))
def test_gram_iteration_is_the_papers(rows: int, columns: int, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    found, expected = orthogonalize(matrix, method="gram"), newton_schulz(matrix.double())
    # The same polynomial of the singular values; its slope at 0, 3.4445 ** 5, is what carries a
    # rounding of 6e-8 furthest.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(12, 12), (48, 16), (16, 48), (3, 24, 8)])
def test_singular_values_come_close_to_one(method: str, shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    values = torch.linalg.svdvals(orthogonalize(matrix, method=method).float())
    # The coefficients keep them between 0.68 and 1.13 rather than at 1 (the post, "coefficients").
    assert values[..., :-3].min() > 0.6
    assert values.max() < 1.25


def test_standard_iteration_is_the_papers_up_to_bf16() -> None:
    matrix = torch.randn(64, 24, generator=torch.Generator().manual_seed(1))
    found = orthogonalize(matrix, method="standard")
    assert found.dtype == torch.bfloat16
    # 15 products in a row, each rounded to 3 digits.
    torch.testing.assert_close(found.float(), newton_schulz(matrix), rtol=0, atol=0.05)


def test_tall_matrices_take_larger_steps() -> None:
    assert (aspect_scale(64, 16), aspect_scale(16, 64), aspect_scale(8, 8)) == (2.0, 1.0, 1.0)


def test_filters_of_a_convolution_are_the_rows_of_one_matrix() -> None:
    rule = Muon(ns_method="gram")
    grad = torch.randn(8, 2, 3, 3, generator=torch.Generator().manual_seed(2))
    hyper = {k: torch.tensor(v) for k, v in rule.hyper(rule.defaults).items()}
    state = {"momentum_buffer": torch.zeros_like(grad)}
    found, new = rule.direction(grad, state, hyper, LocalTensor(shape=(8, 2, 3, 3)))
    assert_rounded(new["momentum_buffer"], 0.05 * grad)
    expected = newton_schulz((0.95 * 0.05 + 0.05) * grad.flatten(1)).reshape(grad.shape)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def lamb(rule: Lamb, param: torch.Tensor, grad: torch.Tensor, **numbers: float) -> torch.Tensor:
    group = rule.defaults | numbers
    hyper = {k: torch.tensor(v, dtype=param.dtype) for k, v in rule.hyper(group).items()}
    factors = rule.prepare(hyper, torch.tensor(1.0, dtype=param.dtype))
    state = {slot: torch.zeros_like(param) for slot in rule.slots}
    whole = LocalTensor(shape=tuple(param.shape))
    return rule.update(param, grad, state, Terms(factors=factors, whole=whole))[0]


CORRECTED = Lamb(bias_correction=True, eps_inside_sqrt=False)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_trust_ratio_is_kept_within_its_bounds(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    param, grad = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64)
    param *= scale
    expected = torch.nn.Parameter(param.clone())
    expected.grad = grad
    with torch.no_grad():
        lamb_step(0.9, 0.999, 1e-8, 0.0)([expected], 1, 1e-3)
    torch.testing.assert_close(lamb(CORRECTED, param, grad), expected.detach())


def test_parameter_of_zeros_moves_with_ratio_one() -> None:
    grad = torch.tensor([3.0, -4.0], dtype=torch.float64)
    moved = lamb(CORRECTED, torch.zeros_like(grad), grad, eps=0.0, lr=0.1)
    # Of the first step m / sqrt(v) is 0.1 / sqrt(0.001), and lr is multiplied by its inverse.
    torch.testing.assert_close(moved, -0.1 * grad.sign())


def test_eps_inside_the_root_and_no_correction() -> None:
    rule = Lamb(bias_correction=False, eps_inside_sqrt=True)
    param, grad = torch.ones(1, dtype=torch.float64), torch.full((1,), 2.0, dtype=torch.float64)
    update = 0.1 * 2 / (0.001 * 4 + 0.5) ** 0.5
    moved = lamb(rule, param, grad, eps=0.5, lr=0.1)
    torch.testing.assert_close(moved, 1 - 0.1 * (1 / update) * torch.full_like(param, update))
    capped = lamb(rule, param, grad, eps=0.5, lr=0.1, max_coeff=2.0)
    torch.testing.assert_close(capped, torch.full_like(param, 1 - 0.1 * 2.0 * update))
