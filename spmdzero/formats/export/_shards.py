"""How many bytes a file of weights may have, and which tensors share one."""

import math
import re
from collections.abc import Mapping

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats._state import StoredTensor

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(size: int | str) -> int:
    """A size such as ``"5GB"`` (10**9 bytes each), ``"500MiB"`` (2**20) or a number, in bytes.

    Raises:
        SpmdZeroUsageError: neither.
    """
    found = re.fullmatch(r"(\d+)\s*([KMG]I?B)?", str(size).strip().upper())
    if not found or not int(found[1]):
        raise SpmdZeroUsageError(f"max_shard_size={size!r}: write a size such as '5GB' or '500MiB'")
    return int(found[1]) * _UNITS[found[2] or ""]


def in_shards(tensors: Mapping[str, StoredTensor], limit: int) -> list[list[str]]:
    """The names of `tensors`, in order, cut where a file would have more than `limit` bytes."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        size = total_bytes({name: tensor})
        if shards[-1] and held + size > limit:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def total_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """What their elements take."""
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors.values())
