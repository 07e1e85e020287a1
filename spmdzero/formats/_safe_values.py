"""Values that a checkpoint's pickles may hold beside tensors and plain ones; none runs code.

torch's own reader of weights refuses every class that it isn't told of. Of those allowed here, a
namespace takes attributes, a path a string, and a date numbers. NumPy's arrays are read without its
own functions, which trust whatever a file says about memory.
"""

import argparse
import contextlib
import datetime
import pathlib
import re
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from spmdzero.formats._trees import mapped

_PLAIN_DTYPE = re.compile(r"[?biufcSU]\d{0,9}")
_ORDERS = ("<", ">", "=", "|")


class _DType:
    """A dtype of numbers or strings, in the form in which NumPy pickles it."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        if not _PLAIN_DTYPE.fullmatch(code):
            raise ValueError(f"an array of numpy's dtype {code}, which is no number or string")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        if order not in _ORDERS:
            raise ValueError(f"numpy's byte order {order!r}")
        self.dtype = self.dtype if order == "|" else self.dtype.newbyteorder(order)


class _Array:
    """An array in the form in which NumPy pickles it; it is made once all bytes are read."""

    def __init__(self, *empty: Any) -> None:
        self.value = np.zeros(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, data = state
        flat = np.frombuffer(_bytes(data), dtype=kind.dtype)
        self.value = flat.reshape(shape, order="F" if fortran else "C").copy(order="K")


def _scalar(kind: _DType, data: Any) -> Any:
    (value,) = np.frombuffer(_bytes(data), dtype=kind.dtype)
    return value


def _bytes(data: Any) -> bytes:
    if not isinstance(data, bytes):
        raise ValueError("an array of numpy's without its bytes")
    return data


def _as_dict(*default: Any) -> dict[Any, Any]:
    return {}


SAFE: Mapping[str, Callable[..., Any]] = {
    **{f"argparse.{cls.__name__}": cls for cls in (argparse.Namespace,)},
    "types.SimpleNamespace": types.SimpleNamespace,
    **{
        f"datetime.{cls.__name__}": cls
        for cls in (
            datetime.date,
            datetime.datetime,
            datetime.time,
            datetime.timedelta,
            datetime.timezone,
        )
    },
    # Python versions have these in different modules. A path of another system can't be opened
    # here.
    **{
        f"{module}.{name}": pathlib.Path if name == "PosixPath" else pathlib.PurePath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    "collections.defaultdict": _as_dict,
    **{f"builtins.{cls.__name__}": cls for cls in (bool, bytes, dict, float, int, list, str)},
    "builtins.frozenset": frozenset,
    "numpy.dtype": _DType,
    "numpy.ndarray": _Array,
    **{
        f"numpy.{package}.multiarray.{name}": made
        for package in ("core", "_core")
        for name, made in (("_reconstruct", _Array), ("scalar", _scalar))
    },
}
"""Each name in a pickle -> the class or function that is called in its place."""

_READING = threading.RLock()


@contextlib.contextmanager
def safe_values(more: Mapping[str, Callable[..., Any]] | None = None) -> Iterator[None]:
    """Context in which `torch.load(weights_only=True)` makes the values of `SAFE` and of `more`.

    Pass the loaded values through `made` before using them.
    """
    names = dict(SAFE) | dict(more or {})
    # torch has one list for the whole process.
    with _READING, torch.serialization.safe_globals([(cls, name) for name, cls in names.items()]):
        yield


def made(tree: Any) -> Any:
    """The loaded values, with NumPy arrays in the place of their stand-ins."""
    return mapped(tree, lambda value: value.value if isinstance(value, _Array) else value)
