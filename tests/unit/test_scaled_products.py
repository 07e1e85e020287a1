"""Products of 8 bits, on plain CPU tensors: torchao's numbers, and its rules for what is cast."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from spmdzero.backend.forms._quantized import (
    absmax,
    largest,
    power_of_two,
    quantized,
    scaled_product,
)
from spmdzero.backend.protocols._region import LowPrecision
from spmdzero.backend.replica import ScaledProducts
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from tests.oracle.eight_bits import DATA, RECIPES, layer, results

pytestmark = pytest.mark.backends("any")


def products(model: nn.Module, **policy: object) -> ScaledProducts:
    told = {"dtype": "fp8", "recipe": "tensorwise", **policy}
    return ScaledProducts(model, LowPrecision(**told))  # type: ignore[bad-argument-type]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_computes_what_torchao_computes(recipe: str) -> None:
    linear, x, grad = layer()
    with products(linear, recipe=recipe)():
        found = results(linear, x, grad)
    recorded = np.load(DATA)
    plain = results(*layer())
    for name, tensor in found.items():
        expected = torch.from_numpy(recorded[f"fp8/{recipe}/{name}"])
        # Sums of 48 to 256 products in fp32, in another order; rounding to 3 bits is the same.
        close = torch.testing.assert_close
        close(tensor, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        # And it isn't what fp32 gives.
        assert not torch.allclose(tensor, plain[name], rtol=1e-3)


def test_integers_are_torchaos() -> None:
    linear, x, _ = layer()
    recorded = np.load(DATA)
    for name, tensor in (("input", x.detach().flatten(0, 1)), ("weight", linear.weight.detach())):
        unit = torch.from_numpy(recorded[f"int8/{name}/scale"]).reshape(-1, 1)
        scale = 127.0 / absmax(tensor, (1,))
        torch.testing.assert_close(scale, 1 / unit, rtol=1e-6, atol=0.0)
        few = quantized(tensor, scale, torch.int8)
        # A last bit of a scale can move a number that lies between two integers.
        apart = (few.int() - torch.from_numpy(recorded[f"int8/{name}"]).int()).abs()
        assert apart.max() <= 1
        assert apart.float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_a_product_of_integers_is_exact_and_one_of_fp8_is_of_its_numbers(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    one, other = (quantized(torch.randn(5, 64), torch.tensor(40.0), dtype) for _ in range(2))
    units = torch.tensor(0.5), torch.tensor(2.0)
    made = scaled_product(one, other, along=((1,), (1,)), scales=units, dtype=torch.float32)
    torch.testing.assert_close(made, one.float() @ other.float().T, rtol=1e-6, atol=1e-3)


def test_what_is_too_large_becomes_the_largest_and_nan_stays() -> None:
    x = torch.tensor([1e6, -1e6, torch.nan, torch.inf])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        few = quantized(x, torch.tensor(1.0), dtype).float()
        most = largest(dtype)
        assert few[:2].tolist() == [most, -most]
        assert few[2].isnan()
        assert few[3] == most
    assert quantized(x[:2], torch.tensor(1.0), torch.int8).tolist() == [127, -127]


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_reaches_the_result(dtype: str, bad: float) -> None:
    linear, x, _ = layer()
    with torch.no_grad():
        x[0, 0, 0] = bad
    for recipe in RECIPES:
        with products(linear, dtype=dtype, recipe=recipe)():
            made = linear(x)
        # By rows it is one row that is lost, else all.
        assert made[0, 0].isnan().all(), recipe
        assert made[1].isnan().all() == (recipe == "tensorwise"), recipe


def test_what_is_skipped_or_narrow_multiplies_as_before() -> None:
    model = nn.Sequential()
    model.inner = nn.ModuleDict({"up": nn.Linear(128, 256), "gate": nn.Linear(128, 128)})
    model.narrow, model.lm_head = nn.Linear(128, 8), nn.Linear(128, 512)
    x = torch.randn(3, 128)

    def changed(**policy: object) -> list[str]:
        before = {n: m(x) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        with products(model, **policy)():
            after = {n: m(x) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        return [n for n in before if not torch.equal(before[n], after[n])]

    assert changed() == ["inner.up"]
    assert changed(skip=()) == ["inner.up", "inner.gate", "lm_head"]
    assert changed(skip=("inner",)) == ["lm_head"]
    assert changed(skip=("u*", "lm_head")) == ["inner.gate"]
    # Outside of the context all is as before.
    assert torch.equal(model.inner["up"](x), F.linear(x, *model.inner["up"].parameters()))
    with pytest.raises(SpmdZeroConfigError, match=r"no module's name is 'inner.op'.*inner.up"):
        products(model, skip=("inner.op",))
    with pytest.raises(
        SpmdZeroConfigError, match=r"no linear layer but.*4 \(up, gate, lm_head, narrow"
    ):
        products(model, skip=("inner", "lm_head"))


def test_weights_of_transformers_conv1d_are_inputs_first() -> None:
    from transformers.pytorch_utils import Conv1D

    conv, linear, x = Conv1D(256, 128), nn.Linear(128, 256), torch.randn(2, 5, 128)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.T)
        linear.bias.copy_(conv.bias.normal_())
    grad = torch.randn(2, 5, 256)
    for recipe in RECIPES:
        found = []
        for module in (conv, linear):
            own = x.clone().requires_grad_()
            module.zero_grad()
            with products(module, recipe=recipe)():
                module(own).backward(grad)
            weight = module.weight.grad
            assert weight is not None
            found.append((own.grad, weight if module is linear else weight.T, module.bias.grad))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


def test_powers_of_two_are_exact() -> None:
    x = torch.cat([2.0 ** torch.arange(-40, 40), torch.rand(2000) * 1e4, torch.tensor([0.0])])
    found = power_of_two(x)
    mantissa, _ = torch.frexp(found[x > 0])
    assert (mantissa == 0.5).all()
    assert ((found <= x) & (x <= 2 * found)).all()
    assert power_of_two(torch.tensor(torch.nan)).isnan()


def test_what_torch_refuses_is_refused_as_before() -> None:
    linear = nn.Linear(128, 128).bfloat16()
    with products(linear)():
        linear(torch.ones(2, 128).bfloat16())
        with pytest.raises(RuntimeError, match="dtype"):
            linear(torch.ones(2, 128))
        with pytest.raises(SpmdZeroUsageError, match=r"spmd\.products.*torch\.func"):
            torch.func.vmap(linear)(torch.ones(2, 3, 128).bfloat16())


def test_no_rows_are_multiplied_too() -> None:
    linear = nn.Linear(128, 128)
    for dtype in ("fp8", "int8"):
        for recipe in RECIPES:
            x = torch.ones(2, 0, 128, requires_grad=True)
            with products(linear, dtype=dtype, recipe=recipe)():
                made = linear(x)
                made.sum().backward()
            assert made.shape == (2, 0, 128)


class Elsewhere(nn.Module):
    """Its attention takes the weights of its own layer, and its forward those of `used`."""

    def __init__(self, *, called: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(128, 4)
        self.used = nn.Linear(128, 128)
        self.called = nn.Linear(128, 128) if called else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(self.attention(x, x, x)[0], self.used.weight)
        return x if self.called is None else self.called(x)


def test_layers_whose_weights_are_used_elsewhere_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "spmdzero")
    x, some = torch.randn(3, 2, 128), Elsewhere(called=True)
    with products(some)():
        some(x)
    assert "2 linear layers multiply in fp8" in caplog.text
    assert "used didn't multiply by their own weights" in caplog.text
    none, said = Elsewhere(called=False), r"no linear layer has multiplied.*\(used\)"
    with pytest.raises(SpmdZeroUsageError, match=said), products(none)():
        none(x)
    with pytest.raises(SpmdZeroConfigError, match=r"no linear layer but.*parametrized"):
        products(nn.Sequential(weight_norm(nn.Linear(128, 128))))


def test_a_module_of_two_names_is_skipped_by_either() -> None:
    model = nn.Module()
    model.heads, model.up = nn.ModuleList([nn.Linear(128, 128)]), nn.Linear(128, 128)
    model.lm_head = model.heads[0]
    x = torch.randn(2, 128)
    before = model.lm_head(x)
    for policy in ({}, {"skip": ("lm_head",)}, {"skip": ("heads.0",)}):
        with products(model, **policy)():
            model.up(x)
            assert torch.equal(model.lm_head(x), before)


def test_a_row_without_dims_and_autocast() -> None:
    linear = nn.Linear(128, 256)
    x = torch.randn(128)
    for dtype in ("fp8", "int8"):
        linear.zero_grad()
        with products(linear, dtype=dtype)():
            torch.testing.assert_close(linear(x), linear(x[None])[0])
            linear(x).sum().backward()
        assert linear.weight.grad is not None
    with products(linear)(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x).dtype is torch.bfloat16
