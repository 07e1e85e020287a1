"""What torch says of an operation's results: shapes, strides and dtypes, by those of its inputs."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from spmdzero.backend.jax._tensor import meta_of
from spmdzero.backend.jax._trees import hashable, swapped

# By all that decides: torch takes up to 0.2 ms to say it, of the operations that it writes in
# Python, and a step asks for the same ones as the step before. It starts afresh when it is full.
_known: dict[Any, Any] = {}
_MOST = 1 << 14


def on_meta(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an operation returns, on the meta device; not to be written to.

    Args:
        func: the operation, which makes the same of the same.
        args, kwargs: its inputs, of which tensors are on any device.

    Raises:
        NotImplementedError: torch doesn't know without data.
    """
    key = (func, torch.get_default_dtype(), hashable((args, kwargs), torch.Tensor, _form))
    if key not in _known:
        made = _made(func, args, kwargs)
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = made
    return _known[key]


def _made(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    args, named = swapped((tuple(args), dict(kwargs)), torch.Tensor, meta_of)
    if "device" in named:
        named["device"] = torch.device("meta")
    return func(*args, **named)


def _form(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype
