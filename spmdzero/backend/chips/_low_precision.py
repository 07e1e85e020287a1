"""The gain of products of 8 bits on each chip."""

from collections.abc import Mapping

GAINS: Mapping[str, Mapping[str, float]] = {
    "v5e": {"fp8": 1.18, "int8": 1.57},
    "v5p": {"fp8": 1.12, "int8": 1.53},
    "v6e": {"fp8": 1.17, "int8": 1.40},
    "tpu7x": {"fp8": 1.63, "int8": 0.97},
}
"""Chip -> dtype -> how many times as fast the seven products of a Llama block are, forward and
backward, with their casts and scales, as in bf16.

By libtpu 0.0.50.1's cycles: a block of Llama 3.1 8B, 16,384 tokens, fp8 tensorwise and int8
rowwise, which is the slower; on tpu7x int8 is tensorwise
(`python tests/benchmarks/eight_bits.py`).
"""


def slower_on(chip: str, dtype: str) -> str | None:
    """The reason why products of a dtype bring nothing on a chip; None if they do or may."""
    gains = GAINS.get(chip, {})
    if gains.get(dtype, 2.0) > 1.0:
        return None
    best = max(gains, key=lambda name: gains[name])
    said = f"on {chip} they take {1 / gains[dtype]:.2f} times as long as in bf16"
    if gains[best] > 1.0:
        return f"{said}, and in {best} {1 / gains[best]:.2f} times"
    return said
