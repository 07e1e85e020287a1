"""Reads durations from the command line."""

import re

from spmdzero.errors import SpmdZeroUsageError

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)(?P<unit>us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def duration(text: str) -> float:
    """Number of seconds in a text such as ``30ms``, ``0.03s`` or ``250us``.

    Raises:
        SpmdZeroUsageError: the text is malformed, or the duration is zero.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None or not float(found["number"]):
        raise SpmdZeroUsageError(
            f"{text!r} is no time: write a number above 0 and its unit, such as 30ms, 0.03s or "
            "250us"
        )
    return float(found["number"]) * _SECONDS[found["unit"]]
