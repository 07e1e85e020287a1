"""What a process of each backend is told, and whether it can be one."""

import importlib.metadata
import os

# The instructions that JAX's XLA may use, as if of another processor: `make test-processors`.
_ISA = os.environ.get("TEST_XLA_ISA", "")

# Compiling is what the suite spends its time on. The first flag leaves out LLVM's optimisation of
# the machine code (a third of the CPU time is left), the second writes fusions by XLA's older
# emitter (half of the rest in torch_xla, two thirds in JAX). That one lets LLVM contract a product
# and a sum into one operation, which rounds once, by what is computed beside them. In torch_xla the
# third takes that operation away, so that what is the same bit for bit in a user's run is so here;
# JAX's tests have the same bits with it. XLA's own passes, and so the ledgers, stay as they are.
_QUICK = "--xla_backend_optimization_level=0"
_OLDER_EMITTER = f"{_QUICK} --xla_cpu_use_fusion_emitters=false"


def installed(backend: str) -> bool:
    """Whether a process can have it; imports nothing, and tells it in a process of the other."""
    try:
        importlib.metadata.version(backend)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _jax_flags() -> str:
    """Newer versions have lost the older emitter; a flag that they don't know ends the process."""
    if _ISA:
        return f"{_QUICK} --xla_cpu_max_isa={_ISA}"
    has_it = installed("jaxlib") and importlib.metadata.version("jaxlib").startswith("0.7.")
    return _OLDER_EMITTER if has_it else _QUICK


_TORCH_XLA_FLAGS = f"{_OLDER_EMITTER} --xla_cpu_max_isa=AVX"
# A compiled program takes 40 to 130 of the 65,530 memory maps that Linux lets a process have, and
# torch_xla keeps 2,048 programs: the whole suite in one process would end in a segmentation fault
# (with 512 it did, in the middle).
_PROGRAMS = "192"

VARIABLES: dict[str, dict[str, str]] = {
    # A newer XLA, as of a newer JAX, ends the process over a flag that it no longer has.
    "torch_xla": {"XLA_FLAGS": _TORCH_XLA_FLAGS, "XLA_COMPILATION_CACHE_SIZE": _PROGRAMS},
    # transformers and accelerate would import torch_xla where it is installed.
    "jax": {"XLA_FLAGS": _jax_flags(), "USE_TORCH_XLA": "false"},
}


def other_than(backend: str) -> str:
    """The one that this process is not of."""
    (other,) = VARIABLES.keys() - {backend}
    return other
