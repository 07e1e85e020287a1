"""Memory maps: Linux limits those of a process, and a program compiled for a CPU takes some."""

from pathlib import Path

from spmdzero._logging import log_once

_LIMIT = Path("/proc/sys/vm/max_map_count")
_OWN = Path("/proc/self/maps")


def limit() -> int | None:
    """Number of memory maps that Linux allows a process; None without such a limit."""
    return int(_LIMIT.read_text()) if _LIMIT.exists() else None


def count() -> int:
    """Number of memory maps of this process; takes about a microsecond for each."""
    return _OWN.read_bytes().count(b"\n")


def are_short() -> bool:
    """Whether three quarters of the memory maps are taken: time to let go of programs."""
    allowed = limit()
    return allowed is not None and count() >= allowed * 3 // 4


def say_room_was_made() -> None:
    """Logs once that programs were let go of."""
    log_once(
        "compiled programs had taken three quarters of the memory maps that Linux lets a process "
        "have (vm.max_map_count), so the least used ones were let go of"
    )
