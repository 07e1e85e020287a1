"""What pyproject.toml says of versions is what the pages, the tools and the code say."""

import re

import pytest
from pages import ROOT
from test_commands import tomllib

from spmdzero.backend.torch_xla._private import TESTED_VERSION

pytestmark = pytest.mark.backends("torch_xla")

TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = TABLE["project"]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
# It has no wheels for newer ones.
NEWEST_OF_TORCH_XLA = "3.13"
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()


def pythons() -> list[str]:
    """Those of the classifiers, oldest first."""
    named = (re.search(r":: (3\.\d+)$", classifier) for classifier in PROJECT["classifiers"])
    return [found[1] for found in named if found]


def test_the_pythons_of_the_classifiers_are_those_that_pip_allows() -> None:
    oldest, newest = (int(version.split(".")[1]) for version in (pythons()[0], pythons()[-1]))
    assert pythons() == [f"3.{minor}" for minor in range(oldest, newest + 1)]
    assert PROJECT["requires-python"] == f">=3.{oldest},<3.{newest + 1}"


def test_the_pages_name_the_oldest_and_the_newest() -> None:
    said = f"Python {pythons()[0]} to {pythons()[-1]}"
    assert said in README
    assert said in QUICKSTART


def test_lint_and_types_are_those_of_the_oldest() -> None:
    oldest = pythons()[0]
    assert TABLE["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    assert TABLE["tool"]["pyrefly"]["python-version"] == oldest


def test_fresh_installs_are_tried_on_the_oldest_and_the_newest_that_torch_xla_has() -> None:
    (tried,) = re.findall(r"^PYTHONS \?= (.+)$", MAKEFILE, re.MULTILINE)
    assert tried.split() == [pythons()[0], NEWEST_OF_TORCH_XLA]
    said = f"Python {pythons()[0]} to {NEWEST_OF_TORCH_XLA}"
    assert said in README
    assert said in QUICKSTART


def test_the_newest_torch_and_jax_are_tried_on_the_newest_python_that_is_there() -> None:
    (tried,) = re.findall(r"^NEWEST_PYTHONS := (.+)$", MAKEFILE, re.MULTILINE)
    assert tried.split()[0] == f"python{pythons()[-1]}"


def test_torch_is_the_version_that_the_code_is_written_for() -> None:
    pins = [f"torch=={TESTED_VERSION}", f"torch_xla=={TESTED_VERSION}"]
    assert PROJECT["optional-dependencies"]["xla"] == pins
    needed = [line for line in PROJECT["dependencies"] if re.match("torch|jax", line)]
    assert needed == [f"torch>={TESTED_VERSION.rpartition('.')[0]}"]
    for page in (README, QUICKSTART):
        assert TESTED_VERSION in page


def test_notebooks_bring_no_backend_and_the_page_names_one_with_them() -> None:
    brought = " ".join(PROJECT["optional-dependencies"]["notebooks"])
    assert not re.search(r"torch|jax|spmdzero", brought)
    assert "'.[jax,notebooks]'" in QUICKSTART
    assert "'.[xla,notebooks]'" in QUICKSTART
    assert "'.[notebooks]'" not in QUICKSTART
