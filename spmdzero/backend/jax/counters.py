"""What this process has compiled, moved and read: see `spmdzero.backend.Counters`."""

from spmdzero.backend.jax._execute import compilations
from spmdzero.backend.jax._host import traffic


def compiled() -> tuple[int, float]:
    """Programs that were compiled, and the seconds that took."""
    return compilations.count, compilations.seconds


def aliased_inputs() -> int:
    """Input buffers that the last compiled program reuses for its outputs (donation)."""
    return compilations.aliased


def host_reads() -> int:
    """Transfers from the devices to the host; each waits for what computes its value."""
    return traffic.reads


def fallbacks() -> dict[str, int]:
    """None: what the table lacks is an error."""
    return {}


def fallback_calls(operation: str) -> int:
    """None, see `fallbacks`."""
    return 0
