"""Shapes, strides and dtypes of an operation's results, which torch derives from its inputs'."""

import functools
import sys
from collections.abc import Hashable, Mapping
from types import CellType, FunctionType
from typing import Any

import torch
from torch._decomp import global_decomposition_table

from spmdzero.backend.forms._tree import form_of, mapped
from spmdzero.backend.jax.lazy._tensor import meta_of

# Results by their keys: torch takes up to 0.2 ms for an operation that it writes in Python, and
# each step asks for the same ones as the step before. The dict is emptied when it is full.
_known: dict[Any, Any] = {}
_MOST = 1 << 14
# Where another torch has no such attribute, nothing is gained and nothing lost.
_KEPT = "__dynamo_disable"


def on_meta(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The operation's result on the meta device, which must not be written.

    Args:
        func: the operation; equal inputs must give equal results.
        args, kwargs: its arguments; their tensors may be on any device.

    Raises:
        NotImplementedError: torch can't tell the result without data.
    """
    key = (func, torch.get_default_dtype(), form_of((args, kwargs), torch.Tensor, _form))
    if key not in _known:
        made = _made(func, args, kwargs)
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = made
    return _known[key]


def _made(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    leave_dynamo_out()
    args, named = mapped((tuple(args), dict(kwargs)), torch.Tensor, meta_of)
    if "device" in named:
        named["device"] = torch.device("meta")
    return func(*args, **named)


def _form(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype


@functools.cache
def leave_dynamo_out() -> None:
    """Has torch's Python for forms of results call itself as it is, unless dynamo is imported."""
    if "torch._dynamo" in sys.modules:
        return
    known = set[FunctionType]()
    waiting = [each for table in global_decomposition_table.values() for each in table.values()]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in known:
            continue
        known.add(function)
        # One decorator around another has it in a variable of its own.
        within = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        waiting += within
        if function.__code__ is _HIDING:
            for hidden in within:
                vars(hidden).setdefault(_KEPT, hidden)


def _is_filled(cell: CellType) -> bool:
    # A variable that isn't set yet has a cell without contents.
    try:
        return callable(cell.cell_contents)
    except ValueError:
        return False


_HIDING = torch._disable_dynamo(lambda: None).__code__  # type: ignore[missing-attribute]
