"""Names in an error message."""

from collections.abc import Sequence


def listed(names: Sequence[str], *, most: int) -> str:
    """The first `most` names, and how many more there are; "" for none."""
    shown = ", ".join(names[:most])
    more = len(names) - most
    return f"{shown} and {more} more" if more > 0 else shown
