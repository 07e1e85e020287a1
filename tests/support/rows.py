"""Marks rows of a table of cases."""

from collections.abc import Mapping
from typing import Any

import pytest


def marks_of(spmd: Mapping[str, Any], *, slow: bool) -> list[pytest.MarkDecorator]:
    """Returns the marks of a case: whether it is slow, and whether JAX alone has what it asks for.

    Args:
        spmd: the case's section `"spmd"`.
        slow: whether it is left to `make test-all`.
    """
    asks = spmd.get("scan", "off") != "off" or spmd.get("attention") == "kernel"
    only = [pytest.mark.backends("jax")] * asks
    return [*only, *[pytest.mark.slow] * slow]
