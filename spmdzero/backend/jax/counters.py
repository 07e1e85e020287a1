"""Counts of compilations, transfers and reads of this process: see `spmdzero.backend.Counters`."""

from spmdzero.backend.jax.graph._execute import compilations
from spmdzero.backend.jax.lazy._host import traffic


def compiled() -> tuple[int, float]:
    """Number of compiled programs, and the seconds that compiling them took."""
    return compilations.count, compilations.seconds


def aliased_inputs() -> int:
    """Number of input buffers that the last compiled program reuses for outputs (donation)."""
    return compilations.aliased


def host_reads() -> int:
    """Number of transfers from the devices to the host; each waits for its value."""
    return traffic.reads


def fallbacks() -> dict[str, int]:
    """Calls per operation that ran on the CPU: none, as an operation without an entry raises."""
    return {}


def fallback_calls(operation: str) -> int:
    """Number of calls of one operation that ran on the CPU: 0, see `fallbacks`."""
    return 0
