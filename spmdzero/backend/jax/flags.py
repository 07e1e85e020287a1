"""The flags that the compilers are started with: see `spmdzero.backend.Flags`."""

from spmdzero.backend.chips._flag_sets import ALWAYS, FLAG_SETS, flags_of, given_to_libtpu
from spmdzero.backend.jax.graph._disk_cache import KeptPrograms
from spmdzero.backend.jax.graph._execute import compilations
from spmdzero.backend.jax.graph._options import chosen, flags_for, of_cpu, of_tpu

__all__ = [
    "ALWAYS",
    "DEBUGGING",
    "FLAG_SETS",
    "apply",
    "cpu_flags",
    "flags_for",
    "in_force",
    "use_cache",
]

# JAX has none that is slow: it hands out what it is asked for.
DEBUGGING: tuple[str, ...] = ()


def apply(name: str) -> None:
    """Hands a set to the TPU compiler with each later program, so that it never comes too late.

    Raises:
        SpmdZeroUsageError: there is no such set.
    """
    flags_of(name, chip=None)
    chosen.name = name


def in_force() -> dict[str, str]:
    """The flags that the TPU compiler gets, from the environment or with each program."""
    return given_to_libtpu() | of_tpu()


def cpu_flags() -> list[str]:
    """The flags of spmdzero for XLA on the CPU."""
    return [f"--{name}={str(value).lower()}" for name, value in of_cpu().items()]


def use_cache(path: str) -> None:
    """Keeps compiled programs in the folder `path`; an empty path changes nothing."""
    if path:
        compilations.folder = KeptPrograms(path)
