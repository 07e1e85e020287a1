"""Counts the calls of attention that are kernels in programs for TPUs, and the others."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from spmdzero.backend import AttentionCall


@dataclass(frozen=True, kw_only=True)
class AttentionUse:
    """Calls of `scaled_dot_product_attention` that are computed alike, for the same reason.

    Attributes:
        calls: number of calls.
        first: line and submodule of the first call.
        plain_because: why no kernel computes them, None if a kernel does.
    """

    calls: int
    first: str
    plain_because: str | None


def attention_uses(calls: Iterable[AttentionCall]) -> tuple[AttentionUse, ...]:
    """The calls of one forward by reason, those that are kernels first."""
    counts: Counter[str | None] = Counter()
    first: dict[str | None, str] = {}
    for call in calls:
        counts[call.plain_because] += 1
        first.setdefault(call.plain_because, call.where)
    return tuple(
        AttentionUse(calls=counts[why], first=first[why], plain_because=why)
        for why in sorted(counts, key=lambda why: (why is not None, why))
    )
