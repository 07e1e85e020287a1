"""Memory maps of this process: see `spmdzero.backend.MemoryMaps`."""

from pathlib import Path

_LIMIT = Path("/proc/sys/vm/max_map_count")
_OWN = Path("/proc/self/maps")


def limit() -> int | None:
    """Number of memory maps that Linux allows this process; None without such a limit."""
    return int(_LIMIT.read_text()) if _LIMIT.exists() else None


def count() -> int:
    """Number of memory maps in use."""
    return _OWN.read_bytes().count(b"\n")


def make_room() -> int:
    """Does nothing, as `Compilations` keeps a limited number of programs; returns 0."""
    return 0
