"""Eight virtual CPU devices for the process: their count is fixed at the first device access.

A process has one backend: what SPMDZERO_BACKEND says, else torch_xla where nothing but files of it
is asked for, else JAX where it is installed. Files say themselves which they run on, in
`tests/support/declared.py`'s way.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from spmdzero._logging import forget_what_was_logged
from spmdzero.backend import Mesh, current, runtime
from spmdzero.plan import MeshSpec
from tests.support.backends import VARIABLES, other_than
from tests.support.declared import Backends, CollectError, backends_of
from tests.support.processes import local_rank


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--suite",
        choices=("test", "test-all"),
        help="the files that this target of the Makefile runs on the backend; else all that can",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the backend and how it starts, before a test's file imports it."""
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"} | local_rank()
    paths = [Path(argument.partition("::")[0]).absolute() for argument in config.args]
    try:
        asked_for = bool(paths) and all(
            path.is_file() and not backends_of(path).suits("jax") for path in paths
        )
    except CollectError:  # Collecting says it.
        asked_for = False
    no_jax = importlib.util.find_spec("jax") is None
    # Set, so that child processes have it too.
    backend = os.environ.setdefault(
        "SPMDZERO_BACKEND", "torch_xla" if asked_for or no_jax else "jax"
    )
    os.environ |= VARIABLES[backend]
    if backend == "jax":
        # A test of single operations would start JAX with one device, for all that follow it.
        importlib.import_module("jax").config.update("jax_num_cpu_devices", 8)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files of the other backend, and those that another target runs, unimported."""
    if not collection_path.match("test_*.py"):
        return None
    backend, suite = os.environ["SPMDZERO_BACKEND"], config.getoption("suite")
    return not backends_of(collection_path).chosen(backend, suite) or None


def pytest_collect_file(file_path: Path) -> None:
    """Says of a file of the other backend that is asked for by name what would run it."""
    backend = os.environ["SPMDZERO_BACKEND"]
    if file_path.match("test_*.py") and not backends_of(file_path).suits(backend):
        told = f"SPMDZERO_BACKEND is {backend}"
        raise CollectError(f"{told}, and {file_path.name} runs on {other_than(backend)} alone")


# Before pytest's own, which leaves out what -m does not ask for.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out single tests of the other backend."""
    left_out = [item for item in items if not _runs_here(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _runs_here(item: pytest.Item) -> bool:
    backend = os.environ["SPMDZERO_BACKEND"]
    marks = item.iter_markers("backends")
    return all(Backends(mark.args, **mark.kwargs).suits(backend) for mark in marks)


@pytest.fixture(autouse=True)
def _nothing_was_logged_yet() -> None:
    """A line that is logged once in a process is logged in each test that asks for it."""
    forget_what_was_logged()


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    runtime.start()
    return current().mesh(MeshSpec((("fsdp", 8),)))
