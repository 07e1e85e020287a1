"""Formats numbers of bytes for people."""

_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def sized(count: int) -> str:
    """A number of bytes with three digits: ``22.1 GiB``, ``461 MiB`` or ``12 B``."""
    for unit, size in _UNITS:
        # A size that rounds to 1,000 of a unit is written in the next unit.
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
