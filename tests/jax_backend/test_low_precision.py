"""`"spmd": {"products": ...}`: linear layers that multiply in 8 bits, in whole steps."""

import collections
import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

import spmdzero
from spmdzero.backend.forms._quantized import ABSMAX, QUANTIZED, SCALED_PRODUCT
from spmdzero.backend.jax.ops import lowering, torch_dtype
from spmdzero.engine import counting_work
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.inspect import CollectiveLedger
from tests.engine.test_stage_3 import ALL, Tied, batches
from tests.jax_backend.for_tpus import step_for_tpus
from tests.jax_backend.op_arrays import to_jax, to_torch, x64
from tests.support import engines

slow = pytest.mark.slow
WIDTH, BLOCKS = 128, 4
FP8, INT8 = {"dtype": "fp8", "skip": ["head"]}, {"dtype": "int8", "skip": ["head"]}
FP8_ALL = {"dtype": "fp8", "skip": []}
BY_ROWS = FP8 | {"recipe": "rowwise"}


def of_jax(func: Any, *args: Any) -> torch.Tensor:
    found = lowering(func)
    assert found is not None
    with x64():
        made = found(*[to_jax(a) if isinstance(a, torch.Tensor) else a for a in args])
        dtype = torch_dtype(made.dtype)
        if dtype.itemsize > 1 or dtype is torch.int8:
            return to_torch(made, dtype)
        # numpy has no fp8.
        return to_torch(made.astype("float32"), torch.float32).to(dtype)


EVERY_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
"""All numbers of bf16, both infinities and NaNs among them."""


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_casts_are_torchs_bit_for_bit(dtype: torch.dtype) -> None:
    numbers = EVERY_BF16
    if dtype is torch.int8:
        numbers = numbers[~numbers.isnan()]
    for scale in (1.0, 3.7):
        args = numbers, torch.tensor(scale), dtype
        one, other = of_jax(QUANTIZED, *args), QUANTIZED(*args)
        assert one.dtype is other.dtype is dtype
        # NaN has many forms.
        same = (one.float() == other.float()) | (one.float().isnan() & other.float().isnan())
        assert same.all()


def test_largest_sizes_powers_and_products_are_torchs() -> None:
    torch.manual_seed(0)
    numbers = torch.cat([2.0 ** torch.arange(-40, 40), torch.rand(20_000) * 1e4])
    power = torch.ops.spmdzero.power_of_two.default
    assert torch.equal(of_jax(power, numbers), power(numbers))
    nothing = torch.zeros(2, 0, 64)
    assert torch.equal(of_jax(ABSMAX, nothing, []), torch.zeros(()))
    assert torch.equal(of_jax(ABSMAX, nothing, [0, 1]), torch.zeros(1, 1, 64))
    x = torch.randn(3, 5, 64, dtype=torch.bfloat16)
    for dims in ([], [-1], [0, 1]):
        assert torch.equal(of_jax(ABSMAX, x, dims), ABSMAX(x, dims))
    assert of_jax(ABSMAX, torch.tensor([1.0, torch.nan]), []).isnan()
    units = torch.rand(3, 5, 1), torch.rand(7)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        few = QUANTIZED(x, torch.tensor(20.0), dtype)
        other = QUANTIZED(torch.randn(7, 64), torch.tensor(20.0), dtype)
        args = few, other, [-1], [1], *units, torch.float32
        torch.testing.assert_close(of_jax(SCALED_PRODUCT, *args), SCALED_PRODUCT(*args))


def test_a_sum_of_many_products_of_int8_is_exact() -> None:
    # 127 * 127 * 140,000 is more than int32 holds.
    ones = torch.full((140_000, 2), 127, dtype=torch.int8)
    unit = torch.tensor(1.0)
    made = of_jax(SCALED_PRODUCT, ones, ones, [0], [0], unit, unit, torch.float32)
    assert torch.equal(made, torch.full((2, 2), 127.0 * 127.0 * 140_000))


def started(products: Any, *, stage: int = 2, **spmd: Any) -> spmdzero.Engine:
    torch.manual_seed(0)
    zero = ALL if stage == 3 else {"stage": stage}
    told = {"reduction": "explicit", **({"products": products} if products else {}), **spmd}
    return engines.start(
        Tied(blocks=BLOCKS, width=WIDTH), bf16={"enabled": True}, zero_optimization=zero, spmd=told
    )


@functools.cache
def losses_of(dtype: str, recipe: str, stage: int, scan: str, recompute: str) -> list[float]:
    engine = started(
        {"dtype": dtype, "recipe": recipe, "skip": ["head"]},
        stage=stage, scan=scan, recompute=recompute,
    )  # fmt: skip
    return [engines.three_calls(engine, batch).item() for batch in batches(4)]


@pytest.mark.parametrize(
    ("dtype", "recipe"),
    [("fp8", "tensorwise"), pytest.param("fp8", "rowwise", marks=slow), ("int8", "rowwise")],
)
@pytest.mark.parametrize(
    ("stage", "scan", "recompute"),
    [
        (3, "on", "everything"),
        pytest.param(3, "on", "nothing", marks=slow),
        pytest.param(3, "off", "dots", marks=slow),
        pytest.param(0, "off", "nothing", marks=slow),
        pytest.param(1, "off", "everything", marks=slow),
    ],
)
def test_losses_are_those_of_stage_2(
    dtype: str, recipe: str, stage: int, scan: str, recompute: str
) -> None:
    found = losses_of(dtype, recipe, stage, scan, recompute)
    assert found == losses_of(dtype, recipe, 2, "off", "nothing")


def test_losses_are_near_those_of_bf16_and_not_the_same() -> None:
    engine = started(None)
    plain = [engines.three_calls(engine, batch).item() for batch in batches(4)]
    # fp8 has 3 bits beside the first, so that a product is 3 % off; a loss is of thousands.
    for found in (
        losses_of("fp8", "tensorwise", 2, "off", "nothing"),
        losses_of("int8", "rowwise", 2, "off", "nothing"),
    ):
        assert found == pytest.approx(plain, rel=2e-3)
        assert found != plain


@pytest.mark.parametrize("scan", ["on", pytest.param("off", marks=slow)])
def test_weights_cross_in_8_bits_at_stage_3_where_tensors_have_scales(scan: str) -> None:
    dtypes = {}
    for name, products in (("tensorwise", FP8), ("rowwise", BY_ROWS), ("int8", INT8)):
        engine = started(products, stage=3, scan=scan)
        texts: list[str] = []
        with engine.observe(lambda graph, texts=texts: texts.append(graph.hlo())):
            engines.one_call(engine, batches(1, length=4)[0])
        ledger = CollectiveLedger.from_hlo(*texts)
        gathers = [c for c in ledger.of_role("parameter") if c.kind == "all-gather"]
        weights = [c for c in gathers if ".up." in c.tensor and len(c.shape) > 1]
        dtypes[name] = {c.dtype for c in weights}
        # The table, which is a head too, keeps its dtype.
        assert {c.dtype for c in gathers if c.tensor == "embed.weight"} == {"f32"}
    # XLA's CPU compiler widens bf16 to 32 bits, and fp8 to 16.
    assert dtypes == {"tensorwise": {"f16"}, "rowwise": {"f32"}, "int8": {"f32"}}


def test_a_tpu_is_handed_products_and_gathers_of_8_bits() -> None:
    text = step_for_tpus(started(FP8, stage=3, scan="on"), batches(1)[0])
    products = re.findall(r"dot_general .*: \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\)", text)
    # A body is written once: two layers, forward and, as it computes all again, in the backward;
    # there the gradient is in e5m2, by two factors each. The head stays in bf16.
    few = collections.Counter(pair for pair in products if "f8" in "".join(pair))
    assert few[("f8E5M2", "f8E4M3FN")] == 4
    assert few[("f8E4M3FN", "f8E4M3FN")] >= 2
    assert ("bf16", "bf16") in products
    gathers = re.findall(r'"stablehlo.all_gather"\(.*-> tensor<[\dx]*(\w+)>', text)
    assert gathers.count("f8E4M3FN") == 4


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """A weight as it is by int8 and a scale for each row, with the gradient of itself."""
    with torch.no_grad():
        unit = weight.abs().amax(-1, keepdim=True) / 127
        off = (weight / unit).round() * unit - weight
    return weight + off


class Rounded(Tied):
    """`Tied` with rounded weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = rounded(self.embed.weight)
        hidden = F.embedding(x, table)
        for block in self.blocks:
            up, down = block.up, block.down
            inner = F.gelu(F.linear(block.norm(hidden), rounded(up.weight), up.bias))
            hidden = hidden + F.linear(inner, rounded(down.weight), down.bias)
        logits = F.linear(hidden, table)
        return F.cross_entropy(logits.flatten(0, 1), x.roll(-1, 1).flatten())


@pytest.mark.parametrize("scan", ["on", pytest.param("off", marks=slow)])
def test_weights_that_cross_in_int8_are_computed_with_as_they_come_out(scan: str) -> None:
    found = []
    for stage, zero in ((2, {}), (3, {"zero_quantized_weights": True}), (3, {})):
        torch.manual_seed(0)
        model = (Rounded if stage == 2 else Tied)(blocks=BLOCKS, width=WIDTH)
        engine = engines.start(
            model, zero_optimization={**ALL, "stage": stage, **zero},
            spmd={"scan": scan if stage == 3 else "off", "min_shard_elements": 2048},
        )  # fmt: skip
        found.append([engines.three_calls(engine, batch).item() for batch in batches(4)])
    emulated, quantized, plain = found
    # fp32 sums in another order, over four steps of AdamW.
    assert quantized == pytest.approx(emulated, rel=1e-5)
    assert quantized != pytest.approx(plain, rel=1e-5)


def test_the_wire_has_int8_for_weights_and_their_scales() -> None:
    engine = engines.start(
        Tied(blocks=BLOCKS, width=WIDTH), bf16={"enabled": True},
        zero_optimization={**ALL, "zero_quantized_weights": True}, spmd={"scan": "on"},
    )  # fmt: skip
    texts: list[str] = []
    with engine.observe(lambda graph: texts.append(graph.hlo())):
        engines.one_call(engine, batches(1, length=4)[0])
    ledger = CollectiveLedger.from_hlo(*texts)
    gathers = [c for c in ledger.of_role("parameter") if c.kind == "all-gather"]
    assert {(c.dtype, c.shape[-1] > 1) for c in gathers} == {("s8", True), ("f32", False)}
    assert engine.zero_quantized_weights()


def test_below_stage_3_there_is_nothing_to_gather_in_int8(caplog: pytest.LogCaptureFixture) -> None:
    engines.start(Tied(), zero_optimization={"stage": 2, "zero_quantized_weights": True})
    assert "zero_quantized_weights has no effect below stage 3" in caplog.text


def test_a_models_arithmetic_counts_as_before() -> None:
    counts = []
    for products in (None, FP8, INT8):
        engine = started(products)
        with counting_work() as count:
            engine(batches(1)[0])
        counts.append(count.take())
    assert counts[1:] == counts[:1] * 2
    assert counts[0].flops > 0


@pytest.mark.parametrize("layer", [nn.Linear, Conv1D])
def test_devices_that_share_rows_gather_no_activations(layer: type[nn.Module]) -> None:
    width = 256
    model = nn.Sequential(*(layer(width, width) for _ in range(2)))
    engine = engines.start(
        model,
        bf16={"enabled": True},
        spmd={"mesh": {"fsdp": 2, "sequence": 4}, "products": FP8_ALL},
    )
    texts: list[str] = []
    with engine.observe(lambda graph: texts.append(graph.hlo())):
        loss = engine(torch.randn(2, 64, width).bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
    ledger = CollectiveLedger.from_hlo(*texts)
    gathers = [c for c in ledger.collectives if c.role == "sequence" and c.kind == "all-gather"]
    assert gathers == []


def test_what_is_not_finite_ends_in_the_loss_and_is_told() -> None:
    # int8 has no number that isn't finite.
    engine = started(INT8, check_finite=True)
    with torch.no_grad():
        engine.module.blocks[1].up.weight[0, 0] = torch.inf
    with pytest.raises(spmdzero.SpmdZeroError, match="nan"):
        engines.three_calls(engine, batches(1)[0])


@pytest.mark.parametrize(
    ("products", "spmd", "said"),
    [
        ({"dtype": "fp4"}, {}, "spmd.products.dtype.*fp4"),
        ({"dtype": "fp8", "recipes": "x"}, {}, "Did you mean 'recipe'"),
        ({"recipe": "rowwise"}, {}, "spmd.products.dtype"),
        ({"dtype": "fp8", "skip": ["blocks.*.op"]}, {}, "no module's name is 'blocks.*.op'"),
        ({"dtype": "fp8", "skip": ["blocks", "head"]}, {}, "no linear layer"),
        ({"dtype": "fp8"}, {"forward": "global", "reduction": "auto"}, "spmd.products.*region"),
    ],
)
def test_what_is_wrong_is_named(products: Any, spmd: dict[str, Any], said: str) -> None:
    with pytest.raises(SpmdZeroConfigError, match=said):
        started(products, **spmd)


def test_chips_on_which_nothing_is_won_say_so() -> None:
    pytest.importorskip("libtpu")
    model = nn.Sequential(nn.Linear(128, 128))
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "spmd": {"products": {"dtype": "int8"}},
    }  # fmt: skip
    with pytest.raises(SpmdZeroConfigError, match=r"on tpu7x they take 1.03 times as long"):
        spmdzero.explain(model, config, torch.ones(8, 128), tpu=["tpu7x:2x2x1"])
    with pytest.raises(SpmdZeroConfigError, match=r"on tpu7x they take 1.03 times as long"):
        spmdzero.plan_for(model, config, torch.ones(8, 128), tpu="tpu7x:2x2x1")
