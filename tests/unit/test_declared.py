"""Each file of tests says which backends run it, and the Makefile's targets are made of that."""

from pathlib import Path

import pytest

from tests.support.backends import VARIABLES
from tests.support.declared import Backends, CollectError, backends_of

pytestmark = pytest.mark.backends("any")

TESTS = Path(__file__).parents[1]


def chosen(said: Backends, suite: str | None) -> set[str]:
    return {backend for backend in VARIABLES if said.chosen(backend, suite)}


@pytest.mark.parametrize(
    ("said", "test", "test_all", "by_hand"),
    [
        (Backends(("jax",)), {"jax"}, {"jax"}, {"jax"}),
        (Backends(("torch_xla", "jax")), {*VARIABLES}, {*VARIABLES}, {*VARIABLES}),
        (Backends(("torch_xla",), "jax"), {"torch_xla"}, {*VARIABLES}, {*VARIABLES}),
        (Backends(("any",)), {"torch_xla"}, {"torch_xla"}, {*VARIABLES}),
    ],
)
def test_what_a_target_runs_on_which_backend(
    said: Backends, test: set[str], test_all: set[str], by_hand: set[str]
) -> None:
    assert chosen(said, "test") == test
    assert chosen(said, "test-all") == test_all
    assert chosen(said, None) == by_hand


@pytest.mark.parametrize("names", [(), ("tpu",)])
def test_a_name_that_is_no_backend_is_an_error(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="no backends"):
        Backends(names)


def test_every_file_says_it() -> None:
    for path in TESTS.rglob("test_*.py"):
        assert backends_of(path).names


def test_a_file_that_says_nothing_in_a_folder_that_says_nothing_is_an_error() -> None:
    # Not there: it has no line either.
    with pytest.raises(CollectError, match=r'^tests/unit/test_new.py: .*pytest.mark.backends\("'):
        backends_of(TESTS / "unit" / "test_new.py")


def test_a_folders_line_holds_for_its_files_that_have_none() -> None:
    assert backends_of(TESTS / "jax_backend" / "test_new.py") == Backends(("jax",))
    assert backends_of(Path(__file__)) == Backends(("any",))
