"""Kernels with windows, soft caps and sinks, interpreted on the CPU, beside the same in torch."""

import functools
import inspect
from typing import Any

import pytest
import torch

from spmdzero.backend import Mesh
from spmdzero.backend.attention import AttentionKernels
from spmdzero.backend.attention._call import Call, Seen
from spmdzero.backend.attention._transformers import masks_noted, what_is_seen
from spmdzero.backend.jax.kernels._attention import KERNELS
from tests.unit.region_harness import Apply, Probe

ROWS = 8  # one for each device


def by_torch(q: Any, k: Any, v: Any, sinks: Any, keys: Any, *, seen: Seen, cap: float) -> Any:
    """The output, with all weights at once."""
    group = q.shape[1] // k.shape[1]
    products = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    products = cap * (products / cap).tanh()
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    shown = (i - j).abs() < (seen.window or k.shape[2])
    if seen.causal:
        shown = shown & (i >= j)
    shown = shown & keys
    products = products.masked_fill(~shown, float("-inf"))
    sink = sinks.view(1, -1, 1, 1).expand(*products.shape[:3], 1)
    weights = torch.cat((products, sink), -1).softmax(-1)[..., :-1]
    return weights @ v.repeat_interleave(group, 1)


@pytest.mark.parametrize(
    "masked",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["whole", "keys masked"],
)
@pytest.mark.parametrize(
    ("causal", "window", "length"),
    [
        (True, 150, 1100),
        pytest.param(True, None, 1100, marks=pytest.mark.slow),
        pytest.param(False, 150, 1100, marks=pytest.mark.slow),
        pytest.param(False, 700, 1536, marks=pytest.mark.slow),
        pytest.param(True, 1, 300, marks=pytest.mark.slow),
    ],
)
def test_kernels_compute_windows_caps_and_sinks_forward_and_backward(
    mesh: Mesh, masked: bool, causal: bool, window: int | None, length: int
) -> None:
    drawn = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(ROWS, heads, length, 16, generator=drawn) for heads in (2, 1, 1, 2)
    )
    sinks = torch.randn(2, generator=drawn)
    keys = torch.arange(length) < torch.randint(
        length // 2, length, (ROWS, 1, 1, 1), generator=drawn
    )
    keys = keys if masked else torch.ones_like(keys)

    def forward(q: Any, k: Any, v: Any, grad: Any, keys: Any, sinks: Any) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v, sinks)]
        seen = Seen(causal=causal, window=window, keys=keys if masked else None)
        with torch.enable_grad():
            call = Call(
                query=leaves[0], key=leaves[1], value=leaves[2], sinks=leaves[3][0], soft_cap=1.5,
                seen=seen, enable_gqa=True,
            )  # fmt: skip
            call.require_kernel(short=False)
            out = call.run(KERNELS, platform="cpu")
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    probe = Probe(Apply(forward), mesh)
    given = [q, k, v, grad, keys, sinks.expand(ROWS, 2)]
    with torch.no_grad():
        found = probe(*map(probe.batch, given))
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v, sinks)]
    query, key, value, sink = exact
    seen = Seen(causal=causal, window=window, keys=None)
    out = by_torch(query, key, value, sink, keys, seen=seen, cap=1.5)
    out.backward(grad.double())
    for ours, right in zip(found[:4], (out.detach(), *(e.grad for e in exact[:3])), strict=True):
        # As of kernels without a window: sums of fp32 and twice an exponential.
        bound = 1e-5 * right.abs().max().item()
        torch.testing.assert_close(ours.cpu().double(), right, rtol=0, atol=bound)
    to_sinks = exact[3].grad
    assert to_sinks is not None
    bound = 1e-5 * to_sinks.abs().max().item()
    torch.testing.assert_close(found[4].cpu().double().sum(0), to_sinks, rtol=0, atol=bound)


@pytest.mark.slow
def test_a_window_a_cap_and_sinks_are_differentiable_twice(mesh: Mesh) -> None:
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(ROWS, heads, 160, 16, generator=drawn) for heads in (2, 1, 1))
    sinks, keys = torch.randn(2, generator=drawn), torch.ones(ROWS, 1, 1, 160, dtype=torch.bool)
    seen = Seen(causal=True, window=50, keys=None)

    def penalty(attend: Any, *leaves: torch.Tensor) -> Any:
        """The gradients of the squares of a gradient."""
        found = torch.autograd.grad(attend(*leaves).tanh().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in found), leaves)

    def kernels(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        call = Call(
            query=q, key=k, value=v, sinks=sinks[0], soft_cap=1.5, seen=seen, enable_gqa=True
        )
        return call.run(KERNELS, platform="cpu")

    def forward(*tensors: Any) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            return penalty(kernels, *leaves)

    probe = Probe(Apply(forward), mesh)
    with torch.no_grad():
        found = [*probe(*map(probe.batch, (q, k, v, sinks.expand(ROWS, 2))))]
    # A device has a row, and the penalty is of the row's own gradient of the sinks.
    for row in range(ROWS):
        exact = [tensor[row : row + 1].double() for tensor in (q, k, v)]
        leaves = [tensor.requires_grad_() for tensor in (*exact, sinks.double())]
        right = penalty(functools.partial(by_torch, keys=keys[:1], seen=seen, cap=1.5), *leaves)
        for ours, theirs in zip(found, right, strict=True):
            bound = 2e-5 * theirs.abs().max().item()
            mine = ours[row : row + 1].cpu().double().view_as(theirs)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=bound)


def _without_cache() -> dict[str, Any]:
    """The argument that older transformers want, by the name that newer ones refuse."""
    from transformers.masking_utils import create_causal_mask

    names = inspect.signature(create_causal_mask).parameters
    return {"cache" if "cache" in names else "past_key_values": None}


def test_masks_of_transformers_are_known_by_what_they_say() -> None:
    from transformers import MistralConfig, masking_utils

    config = MistralConfig(sliding_window=4, attn_implementation="sdpa", attention_chunk_size=4)
    given = {"config": config, "inputs_embeds": torch.zeros(2, 8, 4), **_without_cache()}
    padding = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])

    def seen(make: str, **more: Any) -> tuple[Any, ...] | None:
        mask = getattr(masking_utils, make)(**{"attention_mask": padding, **given, **more})
        found = what_is_seen(mask)
        if found is None:
            return None
        shown = (torch.arange(8)[:, None] - torch.arange(8)).abs() < (found.window or 8)
        shown = shown.tril() if found.causal else shown
        keys = torch.ones(1, 1, 1, 8).bool() if found.keys is None else found.keys
        # It says what the mask shows.
        assert torch.equal(mask.expand(2, 1, 8, 8), (shown & keys).expand(2, 1, 8, 8))
        return found.causal, found.window, found.keys is not None

    def other(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query != key + 2

    with masks_noted():
        assert seen("create_causal_mask") == (True, None, True)
        assert seen("create_sliding_window_causal_mask") == (True, 4, True)
        assert seen("create_sliding_window_causal_mask", attention_mask=None) == (True, 4, False)
        assert seen("create_bidirectional_mask") == (False, None, True)
        assert seen("create_bidirectional_sliding_window_mask") == (False, 5, True)
        assert seen("create_chunked_causal_mask") is None
        assert seen("create_causal_mask", and_mask_function=other) is None
        packed = {"attention_mask": None, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
        assert seen("create_sliding_window_causal_mask", **packed) is None
        written = masking_utils.create_causal_mask(**given, attention_mask=padding).clone()
        made = masking_utils.sdpa_mask(2, 8, 8)
        assert what_is_seen(written) is what_is_seen(made) is None
    assert "noted" not in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"].__qualname__
    assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is masking_utils.sdpa_mask


def test_a_mask_that_was_written_since_says_nothing() -> None:
    from transformers import MistralConfig, masking_utils

    with masks_noted():
        mask = masking_utils.create_sliding_window_causal_mask(
            config=MistralConfig(sliding_window=4, attn_implementation="eager"),
            inputs_embeds=torch.zeros(1, 8, 4), attention_mask=None, **_without_cache(),
        )  # fmt: skip
    assert what_is_seen(mask) == Seen(causal=True, window=4, keys=None)
    mask[:, :, 3] = 0
    assert what_is_seen(mask) is None


def test_attention_of_transformers_is_its_own_again_after_a_forward() -> None:
    from transformers import modeling_utils

    before = modeling_utils.AttentionInterface.get_interface
    kernels = KERNELS
    with AttentionKernels("kernel", kernels, owner=torch.nn.Identity()):
        assert modeling_utils.AttentionInterface.get_interface is not before
    assert modeling_utils.AttentionInterface.get_interface is before
    with AttentionKernels("auto", kernels, owner=torch.nn.Identity()):
        assert modeling_utils.AttentionInterface.get_interface is before
