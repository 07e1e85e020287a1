"""The file of host state, which never runs code when it is read."""

import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats._files import save_torch
from spmdzero.formats._safe_values import made, safe_values
from spmdzero.formats._state import HostState
from spmdzero.formats._trees import mapped

_KINDS: Mapping[str, tuple[type, ...]] = {
    "counters": (dict,),
    "applied": (int, type(None)),
    "skipped": (int, type(None)),
    "param_groups": (list, type(None)),
    "extra": (dict,),
    "excluded": (tuple,),
    "client_state": (dict,),
    "tied": (dict,),
}
_OTHERS = (dict, type(None))


def require_storable(state: HostState) -> None:
    """Checks that `write_host` can write the state; moves and copies no tensor.

    Raises:
        SpmdZeroUsageError: it holds an object that only an unsafe pickle could carry.
    """
    fields = _fields(state)
    if not _is_safe(fields):
        raise SpmdZeroUsageError(
            f"{_culprit(fields)} can't be saved: a checkpoint holds numbers, strings, tensors, "
            "numpy's arrays, paths, dates, and dicts, lists, tuples and namespaces of them, which "
            "can be read without running code. Save its parts in place of it, for example its "
            "state_dict()"
        )


def write_host(state: HostState, path: Path) -> tuple[int, str]:
    """Writes the file for `read_host`; returns its size in bytes and its checksum.

    Raises:
        OSError: as `appearing`.
        SpmdZeroUsageError: as `require_storable`.
    """
    require_storable(state)
    return save_torch(_fields(state), path)


def read_host(path: Path) -> HostState:
    """The state that `write_host` wrote.

    Raises:
        OSError: the file can't be read.
        ValueError: it holds other values.
    """
    with path.open("rb") as file:
        return host_from(file)


def host_bytes(state: HostState) -> bytes:
    """The bytes of the file of `write_host`; raises as `require_storable`."""
    require_storable(state)
    file = io.BytesIO()
    torch.save(_fields(state), file)
    return file.getvalue()


def host_from(file: BinaryIO) -> HostState:
    """The state in an open file of `write_host`; raises as `read_host`."""
    try:
        with safe_values():
            fields = torch.load(file, map_location="cpu", weights_only=True)
        found = HostState(**made(fields))
    except OSError:
        raise
    except Exception as error:
        # torch, or a class of `SAFE`, raises these for bytes of other content.
        raise ValueError(f"it holds no state of a run ({str(error).splitlines()[0]})") from error
    for name, value in _fields(found).items():
        if not isinstance(value, _KINDS.get(name, _OTHERS)):
            raise ValueError(f"its {name} is a {type(value).__name__}")
    if not all(isinstance(group, dict) for group in found.param_groups or []):
        raise ValueError("its param_groups are not all dicts")
    if not all(isinstance(count, int) for count in found.counters.values()):
        raise ValueError("its counters are not all numbers")
    return found


def _fields(state: HostState) -> dict[str, Any]:
    return {item.name: getattr(state, item.name) for item in dataclasses.fields(state)}


def _is_safe(value: Any) -> bool:
    """Whether the value can be written, and read without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(mapped(value, _without_elements), buffer)
        buffer.seek(0)
        with safe_values():
            torch.load(buffer, weights_only=True)
    except Exception:
        # An object of the caller's may raise anything when it is pickled.
        return False
    return True


def _without_elements(value: Any) -> Any:
    """The same kind of value without its elements, on which the check doesn't depend."""
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided:
        return torch.empty(0, dtype=value.dtype)
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return np.empty(0, dtype=value.dtype)
    return value


def _culprit(fields: Any, path: str = "") -> str:
    """The path of the innermost value that can't be saved, such as ``client_state['args']``."""
    items: Any = ()
    if isinstance(fields, dict):
        items = [(f"{path}[{key!r}]" if path else str(key), value) for key, value in fields.items()]
    elif isinstance(fields, list | tuple):
        items = [(f"{path}[{index}]", value) for index, value in enumerate(fields)]
    for inner, value in items:
        if not _is_safe(value):
            return _culprit(value, inner)
    return f"{path} ({type(fields).__name__})"
