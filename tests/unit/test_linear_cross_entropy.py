"""The fused loss against torch's own, in plain torch on the CPU."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.nn import LinearCrossEntropy, linear_cross_entropy
from tests.support.bounds import assert_summed

# Nothing here runs on the devices. But torch counts them at a process's first backward, and those
# of tests that come later would find none.
pytestmark = [pytest.mark.backends("torch_xla", test_all="jax"), pytest.mark.usefixtures("mesh")]

ROWS, HIDDEN, VOCABULARY = 37, 16, 61


def _inputs(dtype=torch.float32, *, bias=False):
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=random)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=random)
    labels = torch.randint(VOCABULARY, (ROWS,), generator=random)
    labels[[3, 17]] = -100
    more = [torch.randn(VOCABULARY, generator=random)] if bias else []
    leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight, *more)]
    return leaves, labels


def _both(leaves, labels, *, scale=1.0, chunk=8, **kwargs):
    """Loss and gradients, fused and torch's own."""
    results = []
    for fused in (True, False):
        own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        bias = own[2] if len(own) > 2 else None
        if fused:
            loss = linear_cross_entropy(own[0], own[1], labels, bias=bias, chunk=chunk, **kwargs)
        else:
            logits = F.linear(own[0], own[1], bias)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            loss = F.cross_entropy(logits, labels, **kwargs)
        (loss * scale).backward()
        results.append((loss.detach(), [leaf.grad for leaf in own]))
    return results


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [8, 37, 1000, None])
def test_loss_and_gradients_are_torchs(reduction, bias, chunk):
    leaves, labels = _inputs(torch.float64, bias=bias)
    (loss, grads), (expected, theirs) = _both(leaves, labels, reduction=reduction, chunk=chunk)
    # fp64 rounds at 1e-16, and a sum of 37 x 61 numbers can lose two digits of that.
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(grads, theirs, rtol=1e-12, atol=1e-13)


def test_fp32_is_torchs_to_its_rounding():
    (loss, grads), (expected, theirs) = _both(*_inputs())
    assert_summed(loss, expected)
    assert_summed(grads, theirs)


def test_bf16_gradients_are_summed_and_scaled_in_fp32():
    leaves, labels = _inputs(torch.bfloat16)
    (loss, grads), _ = _both(leaves, labels)
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    # The reference rounds the logits as the head does, and nothing after.
    logits = F.linear(leaves[0].detach(), leaves[1].detach()).float()
    logits = wide[0] @ wide[1].t() + (logits - wide[0] @ wide[1].t()).detach()
    F.cross_entropy(logits, labels).backward()
    # One rounding to bf16, of 2**-9, is all that is between them; the atol is that of the sums.
    for got, leaf in zip(grads, wide, strict=True):
        torch.testing.assert_close(got.float(), leaf.grad, rtol=2**-8, atol=1e-6)
    assert loss.dtype == torch.float32


def test_fp16_gradients_do_not_underflow_before_the_loss_scale():
    leaves, labels = _inputs(torch.float16)
    # Without a scale in between, 1 / 61 / 1e6 is below fp16's smallest number, 6e-8.
    small = [leaf.detach() * 1e-3 for leaf in leaves]
    (_, grads), _ = _both(small, labels, scale=1e-3)
    (_, scaled), _ = _both(small, labels, scale=1e-3 * 2**14)
    assert torch.count_nonzero(scaled[1]) == scaled[1].numel()
    assert torch.count_nonzero(grads[1]) < grads[1].numel()


def test_all_labels_ignored_is_torchs_nan_with_gradients_of_zero():
    leaves, labels = _inputs()
    labels = torch.full_like(labels, -100)
    (loss, grads), (expected, theirs) = _both(leaves, labels)
    assert loss.isnan()
    assert expected.isnan()
    torch.testing.assert_close(grads, theirs, rtol=0, atol=0)
    assert _both(leaves, labels, reduction="sum")[0][0] == 0


def test_another_ignore_index():
    leaves, labels = _inputs(torch.float64)
    labels = labels.clamp(min=0)
    (loss, grads), (expected, theirs) = _both(leaves, labels, ignore_index=0)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(grads, theirs, rtol=1e-12, atol=1e-13)


def test_leading_dims_are_rows():
    (hidden, weight), labels = _inputs()
    flat = linear_cross_entropy(hidden[:36], weight, labels[:36])
    shaped = linear_cross_entropy(hidden[:36].view(4, 9, HIDDEN), weight, labels[:36].view(4, 9))
    assert flat == shaped


def test_without_gradients_none_is_computed(monkeypatch):
    (hidden, weight), labels = _inputs()
    products = []
    matmul = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: products.append(a.shape) or matmul(a, b)
    )
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels)
    assert products == []
    linear_cross_entropy(hidden, weight, labels)
    assert len(products) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_is_right_under_activation_checkpointing(reentrant):
    (hidden, weight), labels = _inputs(torch.float64)
    _, (_, theirs) = _both((hidden, weight), labels)

    def loss(h):
        return linear_cross_entropy(torch.tanh(torch.atanh(h * 0.1)) * 10, weight, labels, chunk=8)

    checkpoint(loss, hidden, use_reentrant=reentrant).backward()
    torch.testing.assert_close([hidden.grad, weight.grad], theirs, rtol=1e-10, atol=1e-12)


def test_autocast_casts_as_it_does_for_a_linear():
    (hidden, weight), labels = _inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
        expected = F.cross_entropy(F.linear(hidden, weight).float(), labels)
    loss.backward()
    # The same bf16 logits.
    assert_summed(loss, expected)
    assert weight.grad.dtype == torch.float32


def test_a_module_around_a_tied_embedding_trains_it():
    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    loss = LinearCrossEntropy.around(embedding)
    assert loss.weight is embedding.weight
    loss(embedding(torch.arange(5)), torch.arange(5)).backward()
    assert embedding.weight.grad.abs().sum() > 0
    head = nn.Linear(HIDDEN, VOCABULARY)
    assert LinearCrossEntropy.around(head).bias is head.bias
    own = LinearCrossEntropy(HIDDEN, VOCABULARY, bias=True)
    assert set(copy.deepcopy(own).state_dict()) == {"weight", "bias"}


def test_refusals():
    (hidden, weight), labels = _inputs()
    for arguments, words in (
        ((hidden, weight.t(), labels), r"\[vocabulary, hidden\]"),
        ((hidden, weight, F.one_hot(labels.clamp(0), VOCABULARY).float()), "not probabilities"),
        ((hidden, weight, labels.float()), "class numbers"),
        ((hidden.bfloat16(), weight, labels), "one dtype"),
    ):
        with pytest.raises(SpmdZeroUsageError, match=words):
            linear_cross_entropy(*arguments)
    with pytest.raises(SpmdZeroUsageError, match="each row"):
        linear_cross_entropy(hidden, weight, labels, reduction="none")
    with pytest.raises(IndexError, match=r"Target 61 is out of bounds"):
        linear_cross_entropy(hidden, weight, labels.clamp(0) * 0 + 61)
    with pytest.raises(SpmdZeroUsageError, match=r"nn[.]Linear or an nn[.]Embedding"):
        LinearCrossEntropy.around(nn.LayerNorm(3))
