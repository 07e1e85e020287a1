"""Memory maps of this process: see `spmdzero.backend.MemoryMaps`."""

from pathlib import Path

_LIMIT = Path("/proc/sys/vm/max_map_count")
_OWN = Path("/proc/self/maps")


def limit() -> int | None:
    """Memory maps that Linux lets it have; None where there is no such limit."""
    return int(_LIMIT.read_text()) if _LIMIT.exists() else None


def count() -> int:
    """Memory maps in use."""
    return _OWN.read_bytes().count(b"\n")


def make_room() -> int:
    """Compiles nothing: `Compilations` keeps so many programs and lets go of the rest."""
    return 0
