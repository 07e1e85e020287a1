"""How near two float32 computations of one number come to each other, and why.

float32 keeps 24 bits: an operation rounds to 2**-24 = 6e-8 of its result. Other kernels, another
number of devices and another processor, whose instructions are of other widths, round elsewhere.
A comparison with another bound than these says its reason where it stands.
"""

from typing import Any

import pytest
import torch

_ROUNDED = 3e-7
_SUMMED, _OF_ZERO = 1e-5, 1e-6


def rounded(expected: Any) -> Any:
    """Equal but for up to five roundings: a product, a root, a rate that was a float32 once."""
    return pytest.approx(expected, rel=_ROUNDED, abs=0.0)


def summed(expected: Any) -> Any:
    """Equal but for the order of sums: losses, means, norms.

    A sum of m terms in another order differs by up to m * 6e-8 of the terms' magnitude; errors of
    random sign grow with its root. The suite's sums have up to 1,000 terms: 30 * 6e-8 = 2e-6, and a
    few of them follow each other. Where terms of order 1 cancel, the difference stays one of 1e-6,
    whatever is left of them.
    """
    return pytest.approx(expected, rel=_SUMMED, abs=_OF_ZERO)


def assert_summed(actual: Any, expected: Any) -> None:
    """As `summed`, of tensors, or of lists and dicts of tensors; dtypes are equal."""
    torch.testing.assert_close(actual, expected, rtol=_SUMMED, atol=_OF_ZERO)


def assert_rounded(actual: Any, expected: Any) -> None:
    """As `rounded`, of tensors, or of lists and dicts of tensors; dtypes are equal."""
    torch.testing.assert_close(actual, expected, rtol=_ROUNDED, atol=0.0)
