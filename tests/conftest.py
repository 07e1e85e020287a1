"""Eight virtual CPU devices for the process: their count is fixed at the first device access."""

import os

os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "8"
# Compiling is what the suite spends its time on. The first flag leaves out LLVM's optimisation of
# the machine code (a third of the CPU time is left), the second writes fusions by XLA's older
# emitter (half of the rest). That one lets LLVM contract a product and a sum into one operation,
# which rounds once, by what is computed beside them: the third takes that operation away, so that
# what is the same bit for bit in a user's run is so here. XLA's own passes, and so the ledgers,
# stay as they are.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
)
# A compiled program takes 40 to 130 of the 65,530 memory maps that Linux lets a process have, and
# torch_xla keeps 2,048 programs: the whole suite in one process would end in a segmentation fault
# (with 512 it did, in the middle).
os.environ["XLA_COMPILATION_CACHE_SIZE"] = "192"

if os.environ.get("SPMDZERO_BACKEND") == "jax":
    # JAX's compiler is another version, which lacks some of these, or ends the process.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    # transformers and accelerate would import it.
    os.environ["USE_TORCH_XLA"] = "false"

import pytest

from spmdzero._logging import forget_what_was_logged
from spmdzero.backend import Mesh, current
from spmdzero.plan import MeshSpec


@pytest.fixture(autouse=True)
def _nothing_was_logged_yet() -> None:
    """A line that is logged once in a process is logged in each test that asks for it."""
    forget_what_was_logged()


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    current().runtime.start()
    return current().mesh(MeshSpec((("fsdp", 8),)))
