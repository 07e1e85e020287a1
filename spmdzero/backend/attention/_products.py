"""How much arithmetic an attention is, however it is computed."""

import math

import torch

from spmdzero.backend.forms._work import Product


def attention_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    window: int | None = None,
) -> tuple[Product, Product]:
    """The two products of an attention: of queries with keys, and of weights with values.

    Of causal attention half of all pairs count, as published figures have it that are compared
    here: MaxText's (`maxtext_utils.py`, `calculate_tflops_training_per_device`), and the rows of
    docs/benchmarks.md (`tests/benchmarks/on_tpu/work.py`). Of a window the pairs that it shows.

    Args:
        query, key, value: `[..., heads, length, width]`; key and value may have fewer heads.
        causal: whether query i sees only the keys up to i.
        window: query i sees only keys j with ``|i - j| < window``; None for all.
    """
    heads = math.prod(query.shape[:-2])
    pairs = heads * _pairs(query.shape[-2], key.shape[-2], causal=causal, window=window)
    scores = Product(flops=2 * pairs * query.shape[-1], operands=((query,), (key,)))
    out = Product(flops=2 * pairs * value.shape[-1], operands=((query, key), (value,)))
    return scores, out


def _pairs(queries: int, keys: int, *, causal: bool, window: int | None) -> float:
    """How many pairs of a query and a key count; a query sees a half of itself."""
    near = min(window or keys, keys)
    if queries != keys:
        # A cache of keys, or the text of another model, whose mask isn't by positions from 0 on.
        return queries * (near if window else keys)
    before = near * keys - near * near / 2
    return before if causal else min(2 * before, queries * keys)
