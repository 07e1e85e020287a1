"""Close matches for misspelt names, for error messages."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, *, known: Iterable[str]) -> str:
    """A sentence that names the closest known names, or all of them when none is close."""
    known = sorted(known)
    by_lower = {option.lower(): option for option in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(repr(by_lower[option]) for option in close)}?"
    return f"Use one of: {', '.join(known)}."
