"""What is no tensor on the devices, as bytes that never run code when they are read."""

import dataclasses
import io
import pickle
from typing import Any

import torch

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.formats._state import HostState


def dump_host(state: HostState) -> bytes:
    """The state as bytes that `load_host` reads.

    Raises:
        SpmdZeroUsageError: it holds an object that only an unsafe pickle could carry.
    """
    fields = {item.name: getattr(state, item.name) for item in dataclasses.fields(state)}
    data = _safe(fields)
    if data is None:
        raise SpmdZeroUsageError(
            f"{_culprit(fields)} can't be saved: a checkpoint holds numbers, strings, tensors, and "
            "dicts, lists and tuples of them, which can be read without running code. Save its "
            "parts in place of it, for example its state_dict()"
        )
    return data


def load_host(data: bytes) -> HostState:
    """The state that `dump_host` wrote.

    Raises:
        ValueError: the bytes are something else.
    """
    try:
        return HostState(**torch.load(io.BytesIO(data), weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, TypeError, EOFError) as error:
        raise ValueError(str(error).split("\n")[0]) from error


def _safe(value: Any) -> bytes | None:
    """The value as bytes; None where reading them would run code."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError, EOFError):
        return None
    return buffer.getvalue()


def _culprit(fields: Any, path: str = "") -> str:
    """The path of the innermost value that can't be saved, such as ``client_state['args']``."""
    items: Any = ()
    if isinstance(fields, dict):
        items = [(f"{path}[{key!r}]" if path else str(key), value) for key, value in fields.items()]
    elif isinstance(fields, list | tuple):
        items = [(f"{path}[{index}]", value) for index, value in enumerate(fields)]
    for inner, value in items:
        if _safe(value) is None:
            return _culprit(value, inner)
    return f"{path} ({type(fields).__name__})"
