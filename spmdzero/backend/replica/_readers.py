"""Reads of a replica's tensors: Python gets the value that all replicas share, or an error.

`RegionDispatch` sees most reads, but not those that torch makes with modes off (`repr`), and not
those of a hook that reads a kept tensor after the region, or in a plain `loss.backward()`. So a
backend asks this module at each of its ways to the host.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from spmdzero._logging import log_once
from spmdzero._user_line import user_line
from spmdzero.errors import ReplicaRegionError

# Number of replicas whose values `repr` shows.
_SHOWN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """The way in which a region reads values.

    Attributes:
        values: maps `[*shape]` in replica space to all replicas' values, `[n, *shape]` on the CPU.
        line: names the user's line and module.
        is_fixed: whether a value is known to be the same on all replicas and at each step.
    """

    values: Callable[[torch.Tensor], torch.Tensor]
    line: Callable[[], str]
    is_fixed: Callable[[torch.Tensor], bool] = lambda _: False


class _Thread(threading.local):
    def __init__(self) -> None:
        # One reader for each region that this thread is in; None while spmdzero itself reads.
        self.readers: list[Reader | None] = []


_thread = _Thread()


@contextlib.contextmanager
def reads_by(reader: Reader | None) -> Iterator[None]:
    """Context in which `reader` does the reads of this thread."""
    _thread.readers.append(reader)
    try:
        yield
    finally:
        _thread.readers.pop()


def reads_are_global() -> contextlib.AbstractContextManager[None]:
    """Context in which reads are of global tensors, not of a replica's."""
    return reads_by(None)


def in_region() -> bool:
    """Whether this thread runs code of a replica."""
    return bool(_thread.readers)


def common_value(values: torch.Tensor, line: Callable[[], str]) -> torch.Tensor:
    """The value that all replicas share, `[*shape]`.

    Args:
        values: of all replicas, `[n, *shape]` on the CPU.
        line: names the line where Python reads it.

    Raises:
        ReplicaRegionError: the replicas disagree.
    """
    first = values[0]
    if not _agree(values):
        shown_values = ", ".join(map(str, values.reshape(len(values), -1)[:, 0].tolist()))
        raise ReplicaRegionError(
            f"{line()}: Python reads a value here, and the replicas disagree on it "
            f"({shown_values}). Each replica runs the same traced program on its own rows, so "
            "Python can't branch on one replica's data. Use torch.where, or move the decision out "
            "of the module; print(tensor) shows what each replica has"
        )
    return first


def current_reader() -> Reader | None:
    """The reader of this thread's innermost region; None outside, and where reads are global."""
    return _thread.readers[-1] if _thread.readers else None


def refuse_read_without_data() -> NoReturn:
    """Raises ReplicaRegionError: Python reads a value of a tensor without data."""
    raise ReplicaRegionError(
        f"{user_line()}: Python reads a value here, and a model on the meta device is explained "
        "without any. Use torch.where, or explain a smaller model with data"
    )


def zeros_without_data(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros on the CPU, for Python to read of a tensor without data; a log line says where."""
    log_once(f"{user_line()}: nothing is computed: what is read here is zero")
    with torch.no_grad():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def text_without_data(tensor: torch.Tensor) -> str:
    """The text that `print` shows for a tensor without data."""
    return (
        f"tensor without data (shape={list(tensor.shape)}, dtype={tensor.dtype}, "
        f"device={str(tensor.device)!r})"
    )


def shown_values(
    tensor: torch.Tensor, values: torch.Tensor, plain: Callable[[torch.Tensor], str]
) -> str:
    """The text that `print` shows for a tensor on which the replicas may disagree.

    Args:
        tensor: on the devices.
        values: of all replicas, `[n, *shape]` on the CPU.
        plain: returns the `repr` of a CPU tensor.
    """
    suffix = f"device={str(tensor.device)!r}"
    if tensor.requires_grad:
        suffix += ", requires_grad=True"
    if _agree(values):
        return f"{plain(values[0])[:-1]}, {suffix})"
    lines = [f"replica {i}: {plain(value)}" for i, value in enumerate(values[:_SHOWN])]
    if len(values) > _SHOWN:
        lines.append(f"... and {len(values) - _SHOWN} more")
    body = "".join("\n  " + line.replace("\n", "\n  ") for line in lines)
    return (
        f"tensor of {len(values)} replicas, another on each (shape={list(tensor.shape)}, "
        f"dtype={tensor.dtype}, {suffix}):{body}"
    )


def _agree(values: torch.Tensor) -> bool:
    first = values[0]
    # NaN agrees with NaN.
    return bool(((values == first) | ((values != values) & (first != first))).all())
