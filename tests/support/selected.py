"""Which cases of a costly set this run of pytest asks for."""

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def selected(request: pytest.FixtureRequest, parameter: str = "case") -> list[Any]:
    """The cases of the selected tests of the requesting module, once each, in their order.

    Args:
        request: of the fixture.
        parameter: the tests' parameter that has the case, or its name.
    """
    mine = (
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    )
    parameters = (item.callspec.params for item in mine if hasattr(item, "callspec"))
    cases = (found[parameter] for found in parameters if parameter in found)
    return list({getattr(case, "name", case): case for case in cases}.values())


def each(cases: Collection[Any], *, sample: Collection[Any]) -> list[Any]:
    """Every case as a parameter of a test, by its name; `make test` runs those of the sample."""
    return [pytest.param(case, id=case.name, marks=outside(sample, case)) for case in cases]


def outside(cases: Collection[Any], case: Any) -> tuple[pytest.MarkDecorator, ...]:
    """What marks a case that is not among those of `make test`."""
    return () if case in cases else (pytest.mark.slow,)


def product_rows(*factors: Iterable[Any], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    """Every row of a product as the parameters of a test; `make test` runs the quick ones."""
    return [pytest.param(*row, marks=outside(quick, row)) for row in itertools.product(*factors)]
