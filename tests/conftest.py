"""Eight virtual CPU devices for the process: their count is fixed at the first device access.

A process has one backend: torch_xla where it is installed. Where it isn't, where SPMDZERO_BACKEND
says so, and where nothing but tests/jax_backend is asked for it is JAX, whose tests run there only.
"""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from spmdzero._logging import forget_what_was_logged
from spmdzero.backend import Mesh, current, runtime
from spmdzero.plan import MeshSpec

# A file that is about torch_xla says so at its top.
OF_TORCH_XLA = re.compile(
    r"^(from spmdzero\.backend\.torch_xla|import torch_xla|from tests\.engine\.program_cache)",
    re.MULTILINE,
)
JAX_TESTS = Path(__file__).parent / "jax_backend"
# Compiling is what the suite spends its time on. The first flag leaves out LLVM's optimisation of
# the machine code (a third of the CPU time is left), the second writes fusions by XLA's older
# emitter (half of the rest). That one lets LLVM contract a product and a sum into one operation,
# which rounds once, by what is computed beside them: the third takes that operation away, so that
# what is the same bit for bit in a user's run is so here. XLA's own passes, and so the ledgers,
# stay as they are.
FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
)
# The first one's of JAX, whose versions of XLA lack others.
JAX_FLAGS = "--xla_backend_optimization_level=0"
# A compiled program takes 40 to 130 of the 65,530 memory maps that Linux lets a process have, and
# torch_xla keeps 2,048 programs: the whole suite in one process would end in a segmentation fault
# (with 512 it did, in the middle).
PROGRAMS = "192"


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the backend and how it starts, before a test's file imports it."""
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    paths = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    only_jax = bool(paths) and all(JAX_TESTS in (path, *path.parents) for path in paths)
    if only_jax or importlib.util.find_spec("torch_xla") is None:
        os.environ.setdefault("SPMDZERO_BACKEND", "jax")
    if os.environ.get("SPMDZERO_BACKEND") != "jax":
        # A newer XLA, as of a newer JAX, ends the process over a flag that it no longer has.
        os.environ |= {"XLA_FLAGS": FLAGS, "XLA_COMPILATION_CACHE_SIZE": PROGRAMS}
    else:
        # transformers and accelerate would import torch_xla where it is installed.
        os.environ |= {"XLA_FLAGS": JAX_FLAGS, "USE_TORCH_XLA": "false"}
        # A test of single operations would start JAX with one device, for all that follow it.
        importlib.import_module("jax").config.update("jax_num_cpu_devices", 8)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out JAX's tests in a process of torch_xla, and those of torch_xla in one of JAX."""
    if os.environ.get("SPMDZERO_BACKEND") != "jax":
        return JAX_TESTS in (collection_path, *collection_path.parents) or None
    is_test = collection_path.suffix == ".py"
    return (is_test and bool(OF_TORCH_XLA.search(collection_path.read_text()))) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out, in a process of JAX, single tests that are about torch_xla."""
    if os.environ.get("SPMDZERO_BACKEND") != "jax":
        return
    left_out = [item for item in items if item.get_closest_marker("torch_xla_only")]
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
