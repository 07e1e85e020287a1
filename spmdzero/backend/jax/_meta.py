"""Shapes, strides and dtypes of an operation's results, which torch derives from its inputs'."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from spmdzero.backend.forms._tree import form_of, mapped
from spmdzero.backend.jax._tensor import meta_of
from spmdzero.backend.jax._without_dynamo import leave_dynamo_out

# Results by their keys: torch takes up to 0.2 ms for an operation that it writes in Python, and
# each step asks for the same ones as the step before. The dict is emptied when it is full.
_known: dict[Any, Any] = {}
_MOST = 1 << 14


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
