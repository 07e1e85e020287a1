"""Reads which backends a file's tests run on: `pytestmark = pytest.mark.backends(...)` at its top.

A folder's `conftest.py` says it for the files that don't. The line is read as text: a file that is
left out is not imported.
"""

import ast
import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.backends import VARIABLES

# pytest shows it without a traceback.
CollectError = pytest.Collector.CollectError
# Where `make test` runs what any backend does for.
_ONCE = "torch_xla"
_LINE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.backends\(([^)]*)\)", re.MULTILINE)
_TESTS = Path(__file__).parents[1]
_HOW = (
    "a file of tests says at its top on which backends they run: "
    'pytestmark = pytest.mark.backends("jax") (see CONTRIBUTING.md)'
)


@dataclass(frozen=True)
class Backends:
    """The arguments of a `pytest.mark.backends`.

    Attributes:
        names: the backends that `make test` runs the tests on, or "any": they run once.
        test_all: one that `make test-all` runs them on besides.
    """

    names: tuple[str, ...]
    test_all: str | None = None

    def __post_init__(self) -> None:
        if not self.names or not {*self.names, self.test_all} <= {*VARIABLES, "any", None}:
            raise ValueError(f"no backends: {self.names}, test_all={self.test_all!r}")

    def suits(self, backend: str) -> bool:
        """Whether the tests can run there at all."""
        return not {"any", backend}.isdisjoint({*self.names, self.test_all})

    def chosen(self, backend: str, suite: str | None) -> bool:
        """Whether the tests are among those that a target of the Makefile runs there.

        Args:
            backend: of this process.
            suite: "test", "test-all"; None: whatever can run.
        """
        if suite is None:
            return self.suits(backend)
        also = {self.test_all} if suite == "test-all" else set()
        return backend in {_ONCE if name == "any" else name for name in self.names} | also


@functools.cache
def backends_of(path: Path) -> Backends:
    """Returns what a file of tests says, else its folder.

    Raises:
        CollectError: neither says it, or what is said names no backend.
    """
    for place in (path, *(folder / "conftest.py" for folder in path.parents)):
        found = _LINE.search(place.read_text()) if place.is_file() else None
        if found:
            call = ast.parse(f"backends({found[1]})", mode="eval").body
            assert isinstance(call, ast.Call)
            names = tuple(ast.literal_eval(name) for name in call.args)
            told = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            try:
                return Backends(names, **told)
            except (TypeError, ValueError) as wrong:
                raise CollectError(f"{_name(place)}: {wrong}: {_HOW}") from None
        if place.parent == _TESTS:
            break
    raise CollectError(f"{_name(path)}: {_HOW}")


def _name(path: Path) -> str:
    return os.path.relpath(path, _TESTS.parent)
