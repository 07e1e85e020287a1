"""Which calls of attention are kernels in programs for TPUs, and which are not."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from spmdzero.backend import AttentionCall


@dataclass(frozen=True, kw_only=True)
class AttentionUse:
    """Calls of `scaled_dot_product_attention` that are computed alike, for the same reason.

    Attributes:
        calls: how many.
        first: the line of the first, and its submodule.
        plain_because: why no kernel computes them, None where one does.
    """

    calls: int
    first: str
    plain_because: str | None


def attention_uses(calls: Iterable[AttentionCall]) -> tuple[AttentionUse, ...]:
    """The calls of one forward, those that are kernels first."""
    counts: Counter[str | None] = Counter()
    first: dict[str | None, str] = {}
    for call in calls:
        counts[call.plain_because] += 1
        first.setdefault(call.plain_because, call.where)
    return tuple(
        AttentionUse(calls=counts[why], first=first[why], plain_because=why)
        for why in sorted(counts, key=lambda why: (why is not None, why))
    )
