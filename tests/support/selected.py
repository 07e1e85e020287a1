"""Which cases of a costly set this run of pytest asks for."""

from collections.abc import Collection
from typing import Any

import pytest


def selected(request: pytest.FixtureRequest) -> list[Any]:
    """The `case` of each selected test of the requesting module, once each, in their order."""
    mine = (
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    )
    parameters = (item.callspec.params for item in mine if hasattr(item, "callspec"))
    cases = (found["case"] for found in parameters if "case" in found)
    return list({case.name: case for case in cases}.values())


def each(cases: Collection[Any], *, sample: Collection[Any]) -> list[Any]:
    """Every case as a parameter of a test, by its name; `make test` runs those of the sample."""
    return [pytest.param(case, id=case.name, marks=outside(sample, case)) for case in cases]


def outside(cases: Collection[Any], case: Any) -> tuple[pytest.MarkDecorator, ...]:
    """What marks a case that is not among those of `make test`."""
    return () if case in cases else (pytest.mark.slow,)
