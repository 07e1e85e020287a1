"""Eight virtual CPU devices for the process: their count is fixed at the first device access.

A process has one backend: what SPMDZERO_BACKEND says, else torch_xla where nothing but files about
it is asked for, else JAX where it is installed. The tests of tests/jax_backend run with JAX only.
"""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from spmdzero._logging import forget_what_was_logged
from spmdzero.backend import Mesh, current, runtime
from spmdzero.plan import MeshSpec
from tests.support.backends import VARIABLES
from tests.support.processes import local_rank

# A file that is about torch_xla says so at its top.
OF_TORCH_XLA = re.compile(
    r"^(from spmdzero\.backend\.torch_xla|import torch_xla|from tests\.engine\.program_cache)",
    re.MULTILINE,
)
JAX_TESTS = Path(__file__).parent / "jax_backend"


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the backend and how it starts, before a test's file imports it."""
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"} | local_rank()
    paths = [Path(argument.partition("::")[0]) for argument in config.args]
    asked_for = bool(paths) and all(path.is_file() and is_of_torch_xla(path) for path in paths)
    no_jax = importlib.util.find_spec("jax") is None
    # Set, so that child processes have it too.
    backend = os.environ.setdefault(
        "SPMDZERO_BACKEND", "torch_xla" if asked_for or no_jax else "jax"
    )
    os.environ |= VARIABLES[backend]
    if backend == "jax":
        # A test of single operations would start JAX with one device, for all that follow it.
        importlib.import_module("jax").config.update("jax_num_cpu_devices", 8)


def is_of_torch_xla(path: Path) -> bool:
    return bool(OF_TORCH_XLA.search(path.read_text()))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out JAX's tests in a process of torch_xla, and those of torch_xla in one of JAX."""
    if os.environ.get("SPMDZERO_BACKEND") != "jax":
        return JAX_TESTS in (collection_path, *collection_path.parents) or None
    return (collection_path.suffix == ".py" and is_of_torch_xla(collection_path)) or None


# Before pytest's own, which leaves out what -m does not ask for.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out single tests that are about the backend that this process doesn't have."""
    other = "torch_xla_only" if os.environ.get("SPMDZERO_BACKEND") == "jax" else "jax_only"
    left_out = [item for item in items if item.get_closest_marker(other)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _nothing_was_logged_yet() -> None:
    """A line that is logged once in a process is logged in each test that asks for it."""
    forget_what_was_logged()


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    runtime.start()
    return current().mesh(MeshSpec((("fsdp", 8),)))
