"""Attention by kernels, interpreted on the CPU, beside torch's own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from spmdzero._logging import forget_what_was_logged
from spmdzero.backend import Mesh, programs
from spmdzero.backend.attention import _splash
from spmdzero.backend.attention._call import Call, PlainError
from spmdzero.backend.attention._form import block_of, padded_length
from spmdzero.errors import SpmdZeroRuntimeError
from tests.unit.region_harness import Apply, Probe

ROWS = 8  # one for each device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call: queries and keys, heads and those of the keys, width, and what is passed besides."""

    lengths: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (2, 2)
    width: int = 64
    mask: str | None = None
    dtype: torch.dtype = torch.float32
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


CAUSAL = {"is_causal": True}
CASES = {
    "grouped queries, keys masked": Case(heads=(4, 2), mask="keys"),
    "odd length, causal": Case(lengths=(200, 200), more=CAUSAL),
}
SLOW = {
    "causal": Case(lengths=(256, 256), more=CAUSAL),
    "full": Case(lengths=(128, 256)),
    "full, odd lengths": Case(lengths=(130, 200)),
    "causal, more queries": Case(lengths=(256, 128), more=CAUSAL),
    "grouped queries, causal": Case(heads=(4, 1), more=CAUSAL),
    "width 80": Case(width=80, more=CAUSAL),
    "width 20": Case(width=20),
    "width 128": Case(width=128, more=CAUSAL),
    "scale": Case(more={"scale": 0.3}),
    "several blocks": Case(lengths=(1100, 1100), heads=(1, 1), more=CAUSAL),
    "several blocks of a mask": Case(lengths=(1100, 1100), heads=(1, 1), mask="pairs"),
    "pairs masked": Case(mask="pairs"),
    "pairs masked, odd lengths": Case(lengths=(130, 200), mask="pairs"),
    "keys masked, odd length": Case(lengths=(130, 200), mask="keys"),
    "bias": Case(heads=(4, 2), mask="bias"),
    "bias, odd length": Case(lengths=(130, 130), mask="bias"),
    "bias of the dtype's least": Case(mask="least"),
    "bf16, causal": Case(dtype=torch.bfloat16, more=CAUSAL),
    "bf16, pairs masked": Case(dtype=torch.bfloat16, mask="pairs"),
}
EACH = [
    *(pytest.param(case, id=name) for name, case in CASES.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
]


def draw(case: Case) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Query, key, value and the gradient of the output; and the mask."""
    made = torch.Generator().manual_seed(0)
    (queries, keys), (heads, own) = case.lengths, case.heads
    shapes = [(heads, queries), (own, keys), (own, keys), (heads, queries)]
    tensors = [
        torch.randn(ROWS, *shape, case.width, generator=made).to(case.dtype) for shape in shapes
    ]
    if case.mask is None:
        return tensors, None
    if case.mask == "keys":
        seen = torch.arange(keys) < torch.randint(1, keys, (ROWS, 1, 1, 1), generator=made)
        return tensors, seen
    seen = torch.rand(ROWS, 1, queries, keys, generator=made) > 0.3
    seen[0, 0, 5] = False  # A query that sees nothing has no weights, in torch too.
    if case.mask == "pairs":
        return tensors, seen
    # The least number is no infinity: who sees nothing else sees everything alike.
    hidden = torch.finfo(torch.float32).min if case.mask == "least" else float("-inf")
    bias = torch.randn(1, heads, 1, keys, generator=made).expand(ROWS, heads, queries, keys)
    return tensors, bias.masked_fill(~seen, hidden)


def by_torch(
    case: Case, tensors: list[torch.Tensor], mask: torch.Tensor | None, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Output and gradients of torch's own on the CPU, in `dtype`."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors[:3]]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    grouped = case.heads[0] != case.heads[1]
    # torch's fused kernel for the CPU keeps the logarithm of a sum beside the largest score, where
    # the least number swallows it: its gradients of such a query are 128 times too large.
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(
            *leaves, attn_mask=mask, enable_gqa=grouped, **case.more
        )
    out.backward(tensors[3].to(dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def by_kernels(
    case: Case, tensors: list[torch.Tensor], mask: torch.Tensor | None, mesh: Mesh
) -> tuple[list[torch.Tensor], Any]:
    """The same of a region whose attention is by kernels, and the region."""
    grouped = case.heads[0] != case.heads[1]

    def forward(q: Any, k: Any, v: Any, grad: Any, mask: Any = None) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(
                *leaves, attn_mask=mask, enable_gqa=grouped, **case.more
            )
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    probe = Probe(Apply(forward), mesh, attention="kernel")
    given = [*tensors, *([mask] if mask is not None else [])]
    with torch.no_grad():
        found = probe(*(probe.batch(tensor) for tensor in given))
    return list(found), probe.region


@pytest.mark.parametrize("case", EACH)
def test_kernels_compute_what_torch_does_forward_and_backward(mesh: Mesh, case: Case) -> None:
    tensors, mask = draw(case)
    found, region = by_kernels(case, tensors, mask, mesh)
    assert [call.plain_because for call in region.attention] == [None]
    exact = by_torch(case, tensors, mask, torch.float64)
    # fp32: sums of up to 1,100 terms, and twice an exponential, of which XLA's errs by some 1e-7;
    # in bf16 the weights are rounded to 8 bits before each of two products in a row, of which a
    # gradient is made (2 x 2 ** -8), and torch's own is that far off too.
    relative = 1e-5 if case.dtype == torch.float32 else 2**-7
    for ours, right in zip(found, exact, strict=True):
        assert ours.dtype == case.dtype
        bound = relative * right.abs().max().item()
        torch.testing.assert_close(ours.cpu().double(), right, rtol=0, atol=bound)


@pytest.mark.slow
def test_a_backward_over_blocks_of_keys_has_a_kernel_for_the_query(mesh: Mesh) -> None:
    for more in (CAUSAL, {}):
        # Of a shape that no other test compiles: lowered kernels are kept.
        case = Case(lengths=(300, 300), heads=(2, 1), width=48, more=more)
        tensors, mask = draw(case)
        found, _ = by_kernels(case, tensors, mask, mesh)
        for ours, right in zip(found, by_torch(case, tensors, mask, torch.float64), strict=True):
            bound = 1e-5 * right.abs().max().item()
            torch.testing.assert_close(ours.cpu().double(), right, rtol=0, atol=bound)


def _by_expand(x: torch.Tensor, times: int) -> torch.Tensor:
    rows, heads, length, width = x.shape
    wide = x[:, :, None, :, :].expand(rows, heads, times, length, width)
    return wide.reshape(rows, heads * times, length, width)


def _interleaved(x: torch.Tensor, times: int) -> torch.Tensor:
    return x.repeat_interleave(times, dim=1)


def _written(x: torch.Tensor, times: int) -> torch.Tensor:
    return x.repeat_interleave(times, dim=1).mul_(2)


@pytest.mark.parametrize(
    ("repeat", "is_seen"), [(_by_expand, True), (_interleaved, True), (_written, False)]
)
def test_keys_and_values_that_a_model_repeats_are_taken_as_they_were(
    mesh: Mesh, repeat: Callable[[torch.Tensor, int], torch.Tensor], is_seen: bool
) -> None:
    case = Case(lengths=(128, 256), heads=(6, 2), mask="keys")
    (q, k, v, grad), mask = draw(case)
    assert mask is not None

    def forward(q: Any, k: Any, v: Any, grad: Any, mask: Any) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        with torch.enable_grad():
            wide = [repeat(tensor, 3) for tensor in leaves[1:]]
            out = F.scaled_dot_product_attention(leaves[0], *wide, attn_mask=mask)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    probe = Probe(Apply(forward), mesh, attention="kernel")
    with torch.no_grad():
        found = probe(*(probe.batch(tensor) for tensor in (q, k, v, grad, mask)))
        text = programs.optimized_hlo(found)
        right = forward(q.double(), k.double(), v.double(), grad.double(), mask)
    assert [call.plain_because for call in probe.region.attention] == [None]
    assert ("6,256,64]" not in text) == is_seen
    for ours, exact in zip(found, right, strict=True):
        bound = 1e-5 * exact.abs().max().item()
        torch.testing.assert_close(ours.cpu().double(), exact, rtol=0, atol=bound)


def test_nothing_crosses_replicas_and_no_weights_are_kept(mesh: Mesh) -> None:
    case = CASES["odd length, causal"]
    found, _ = by_kernels(case, *draw(case), mesh)
    text = programs.optimized_hlo(found)
    for collective in ("all-reduce(", "all-gather(", "all-to-all(", "collective-permute("):
        assert collective not in text


CALL = {name: torch.zeros(1, 2, 256, 64) for name in ("query", "key", "value")}
SHORT = torch.zeros(1, 2, 64, 64)
REFUSED: dict[str, dict[str, Any]] = {
    "drop no weights": {"dropout_p": 0.1},
    "not float16": {name: tensor.half() for name, tensor in CALL.items()},
    "not bfloat16 and float32": {"key": CALL["key"].bfloat16()},
    r"\[batch, heads, length, width\]": {name: tensor[None] for name, tensor in CALL.items()},
    "has 128 positions, and here are 64": dict.fromkeys(CALL, SHORT),
    "are broadcast": {name: CALL[name][:, :1] for name in ("key", "value")},
    "exclude each other": {"attn_mask": torch.ones(256, 256).bool(), "is_causal": True},
    "wants a gradient": {"attn_mask": torch.zeros(256, 256, requires_grad=True)},
    "is float64": {"attn_mask": torch.zeros(256, 256).double()},
    "another shape": {"attn_mask": torch.zeros(2, 256)},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_kernels_dont_take_is_said(reason: str) -> None:
    with pytest.raises(PlainError, match=reason):
        Call(**(CALL | REFUSED[reason])).require_kernel(short=False)
    Call(**CALL).require_kernel(short=False)


def test_a_plain_call_is_torchs_is_noted_and_is_logged_once(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return x

    forget_what_was_logged()
    probe = Probe(Apply(twice), mesh, attention="kernel")
    with torch.no_grad(), caplog.at_level("INFO", logger="spmdzero"):
        probe(probe.batch(torch.randn(ROWS, 2, 128, 16)))
    assert len(probe.region.attention) == 2
    (said,) = [line for line in caplog.messages if "plain products" in line]
    assert "test_attention_kernels.py" in said
    assert "dropout_p > 0" in said


@pytest.mark.parametrize(
    "attend",
    [
        pytest.param(lambda x: F.scaled_dot_product_attention(x, x, x), id="three dims"),
        pytest.param(
            lambda x: F.multi_head_attention_forward(
                x, x, x, 32, 2, torch.eye(32).repeat(3, 1).to(x), None, None, None, False, 0.0,
                torch.eye(32).to(x), None, need_weights=False,
            )[0],
            id="nn.MultiheadAttention",
        ),
    ],
)  # fmt: skip
def test_what_calls_attention_reaches_the_kernels(
    mesh: Mesh, attend: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(ROWS, 5, 32, generator=torch.Generator().manual_seed(1))
    probe = Probe(Apply(lambda x: attend(x.transpose(0, 1)).transpose(0, 1)), mesh,
                  attention="kernel")  # fmt: skip
    with torch.no_grad():
        found = probe(probe.batch(x)).cpu()
        one_by_one = [attend(row[None].transpose(0, 1)).transpose(0, 1) for row in x]
    assert [call.plain_because for call in probe.region.attention] == [None]
    torch.testing.assert_close(found, torch.cat(one_by_one), rtol=0, atol=1e-5)


def test_blocks_divide_what_they_are_padded_to() -> None:
    for length in range(1, 5000, 37):
        padded = padded_length(length)
        assert padded >= length
        assert padded % block_of(padded) == 0
        assert padded - length < 128 or padded - length <= padded / 8
    assert [padded_length(n) for n in (64, 128, 1000, 1024, 1100, 8192)] == [
        128, 128, 1024, 1024, 1152, 8192,
    ]  # fmt: skip
    assert (block_of(1024), block_of(1152), block_of(8192)) == (1024, 128, 1024)


def test_kernels_of_another_jax_are_refused_or_left_out(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(ROWS, 2, 128, 16)

    def attend(attention: Any) -> Probe:
        probe = Probe(
            Apply(lambda x: F.scaled_dot_product_attention(x, x, x)), mesh, attention=attention
        )
        with torch.no_grad():
            probe(probe.batch(x))
        return probe

    monkeypatch.setattr(_splash.splash, "_splash_attention_bwd", lambda res, do: None)
    _splash.is_as_known.cache_clear()
    reason = r"jax \S+ has other kernels than those that are known"
    try:
        with pytest.raises(
            SpmdZeroRuntimeError, match=rf'"attention": "kernel".*{reason}: pip install'
        ):
            attend("kernel")
    finally:
        monkeypatch.undo()
        _splash.is_as_known.cache_clear()
    (call,) = attend("kernel").region.attention
    assert call.plain_because is None
