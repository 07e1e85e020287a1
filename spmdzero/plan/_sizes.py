"""Bytes as people read them."""

_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def sized(count: int) -> str:
    """``22.1 GiB``, ``461 MiB`` or ``12 B``: three digits."""
    for unit, size in _UNITS:
        # What would be written as 1,000 of a unit is one of the next.
        if count >= 0.9995 * size:
            return f"{_three(count / size)} {unit}"
    return f"{count} B"


def _three(number: float) -> str:
    return (
        f"{number:.2f}"
        if number < 9.995
        else f"{number:.1f}"
        if number < 99.95
        else f"{number:.0f}"
    )
