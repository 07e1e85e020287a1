"""The classes and functions that a pickle names, found without unpickling it."""

import pickletools
import zipfile
from pathlib import Path

_PLAIN = ("torch", "collections", "_codecs")


def foreign_names(path: Path) -> list[str]:
    """The sorted names, ``module.name``, in the pickle of a .pt file, without torch's own.

    Reads every pickle protocol, zipped or not: for messages about a file that torch has refused.
    """
    found: set[str] = set()
    for data in _pickles(path):
        found |= _names(data)
    return sorted(name for name in found if not name.startswith(tuple(f"{p}." for p in _PLAIN)))


def _pickles(path: Path) -> list[bytes]:
    if not zipfile.is_zipfile(path):
        return [path.read_bytes()]
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]


def _names(data: bytes) -> set[str]:
    found: set[str] = set()
    memo: dict[int, str] = {}
    texts = ["", ""]
    at = 0
    while at < len(data):
        start = at
        try:
            for operation, argument, place in pickletools.genops(data[start:]):
                at = start + (place or 0) + 1
                kind = operation.name
                if kind in ("GLOBAL", "INST"):
                    found.add(str(argument).replace(" ", "."))
                elif kind == "STACK_GLOBAL":
                    found.add(".".join(texts[-2:]))
                elif "UNICODE" in kind:
                    texts.append(str(argument))
                elif kind == "MEMOIZE":
                    memo[len(memo)] = texts[-1]
                elif kind in ("BINPUT", "LONG_BINPUT", "PUT"):
                    memo[int(argument)] = texts[-1]  # type: ignore[arg-type]
                elif kind in ("BINGET", "LONG_BINGET", "GET"):
                    texts.append(memo.get(int(argument), ""))  # type: ignore[arg-type]
        except ValueError:
            # There are no more pickles: in an old .pt file the storages' bytes follow.
            break
    return found
