"""Numbers of bytes as people write them."""

import re

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def bytes_of(written: object) -> int | None:
    """The number of bytes of ``12000000000``, ``"12GB"`` or ``"11.5 GiB"``; None for others.

    kB, MB, GB and TB are powers of 1,000, KiB to TiB powers of 1,024.
    """
    if isinstance(written, bool):
        return None
    if isinstance(written, int):
        return written if written > 0 else None
    found = _WRITTEN.fullmatch(written) if isinstance(written, str) else None
    if found is None or found[2].replace("k", "K") not in _UNITS:
        return None
    return int(float(found[1]) * _UNITS[found[2].replace("k", "K")]) or None
