"""What the compilers are started with: see `spmdzero.backend.Flags`."""

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax

from spmdzero.backend._programs import XlaFlag
from spmdzero.errors import SpmdZeroUsageError

# JAX hands a program's own options to the compiler; named sets are not measured with it yet.
FLAG_SETS: Mapping[str, tuple[XlaFlag, ...]] = {"none": ()}
# As torch_xla does. On v5e:8x8 libtpu 0.0.21 makes all-reduces of the parameters' all-gathers
# without it, and a step moves 1.50 times the floor (1.00 with it).
ALWAYS: Mapping[str, str] = {"xla_tpu_prefer_async_allgather_to_allreduce": "true"}

# With it matrix products were wrong on an AMD EPYC (family 25, model 1) with jaxlib 0.7.1: from the
# second run of a program on, gradients of a GPT of 10 M parameters. JAX leaves it on.
_WRONG_ON_CPU = "xla_cpu_use_xnnpack"


def flags_for(name: str, *, chip: str | None = None) -> Mapping[str, str]:
    """The TPU compiler's flags of a named set, name -> value.

    Raises:
        SpmdZeroUsageError: there is no such set.
    """
    if name not in FLAG_SETS:
        raise SpmdZeroUsageError(
            f'"spmd": {{"xla_flags": {name!r}}} is no set that was measured with the JAX '
            'backend. Use "none", and hand flags to libtpu by LIBTPU_INIT_ARGS'
        )
    return {flag.name: flag.value for flag in FLAG_SETS[name]}


def apply(name: str) -> None:
    """Hands a set to the TPU compiler.

    Raises:
        SpmdZeroUsageError: there is no such set.
    """
    flags_for(name)


def in_force() -> dict[str, str]:
    """None of ours."""
    return {}


def cpu_flags() -> list[str]:
    """What XLA on the CPU is told by spmdzero."""
    return [f"--{name}={str(value).lower()}" for name, value in _of_cpu().items()]


def use_cache(path: str) -> None:
    """Keeps compiled programs in the folder `path`; an empty path changes nothing."""
    if path:
        jax.config.update("jax_compilation_cache_dir", path)


def of_devices() -> dict[str, Any] | None:
    """What the compiler of this process's devices is handed with each program, None for nothing."""
    if jax.default_backend() == "tpu":
        return dict(ALWAYS)
    return dict(_of_cpu()) if jax.default_backend() == "cpu" else None


@functools.cache
def _of_cpu() -> Mapping[str, bool | str]:
    """By program, not by XLA_FLAGS: JAX may have started before, and child processes inherit it."""
    if _WRONG_ON_CPU in os.environ.get("XLA_FLAGS", ""):
        return {}
    options: dict[str, bool | str] = {_WRONG_ON_CPU: False}
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError:
        # A newer XLA has no such option.
        return {}
    return options
