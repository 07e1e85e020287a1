"""What torch says of an operation's results: shapes, strides and dtypes, by those of its inputs."""

from collections.abc import Mapping
from typing import Any

import torch

from spmdzero.backend.jax._tensor import meta_of
from spmdzero.backend.jax._trees import swapped

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
    key = (func, torch.get_default_dtype(), _form(args), _form(kwargs))
    if key not in _known:
        made = _made(func, args, kwargs)
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = made
    return _known[key]


def _made(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    args, named = (swapped(tree, torch.Tensor, meta_of) for tree in (tuple(args), dict(kwargs)))
    if "device" in named:
        named["device"] = torch.device("meta")
    return func(*args, **named)


def _form(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype
    if isinstance(tree, list | tuple):
        return tuple([_form(item) for item in tree])
    if isinstance(tree, Mapping):
        return tuple([(name, _form(item)) for name, item in tree.items()])
    # 1, 1.0 and True are equal, but not the same to an operation.
    return type(tree), tree
