"""What the compilers are started with: see `spmdzero.backend.Flags`."""

from collections.abc import Mapping

import jax

from spmdzero.backend._programs import XlaFlag
from spmdzero.errors import SpmdZeroUsageError

# JAX hands a program's own options to the compiler; named sets are not measured with it yet.
FLAG_SETS: Mapping[str, tuple[XlaFlag, ...]] = {"none": ()}


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
    """None of ours."""
    return []


def use_cache(path: str) -> None:
    """Keeps compiled programs in the folder `path`; an empty path changes nothing."""
    if path:
        jax.config.update("jax_compilation_cache_dir", path)
