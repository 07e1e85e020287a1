"""What a block returned that has yet to run."""

from collections.abc import Callable
from typing import Any

import torch

from spmdzero.backend._current import runtime
from spmdzero.backend.forms._tree import map_tensors
from spmdzero.backend.replica import FollowError

_DEVICE = vars(torch._C.TensorBase)["device"].__get__
_GETTERS = ("shape", "dtype", "layout", "ndim", "requires_grad", "is_meta")
# They ask for the form of a tensor, and not for what is in it.
_FORM = {
    *(vars(torch._C.TensorBase)[name].__get__ for name in _GETTERS),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.get_device,
    torch.Tensor.__len__,
    torch.is_floating_point,
    torch.numel,
}


class StandIn(torch.Tensor):
    """A tensor that asks for its value when somebody computes with it.

    It is a leaf that requires a gradient: what gets past torch's functions, an autograd Function
    of the user's for example, then raises in backward and loses no gradient.
    """

    _value: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, like: torch.Tensor, value: Callable[[], torch.Tensor]) -> "StandIn":
        """Of the form of `like`; `value` makes it real."""
        with torch._C.DisableTorchFunctionSubclass():
            # That of C++, which may have another name for it.
            device = _DEVICE(like)
            made = torch.Tensor._make_wrapper_subclass(
                cls, like.shape, dtype=like.dtype, device=device, requires_grad=True
            )
            made._value = value
            made.register_hook(_refuse)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answers for the form; anything else runs on the value."""
        if func == _DEVICE:
            return runtime.device()
        if func in _FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = made_real((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What got past torch's functions: only a copy of the handle can be had."""
        if func is torch.ops.aten.detach.default:
            (given,) = args
            return cls.of(given, given._value)
        raise followed_error()


def made_real(tree: Any) -> Any:
    """`tree` with the value of each `StandIn` in it."""
    return map_tensors(
        tree, lambda _, found: found._value() if isinstance(found, StandIn) else found
    )


def _refuse(_: torch.Tensor) -> None:
    raise followed_error()


def followed_error() -> FollowError:
    """What is raised where a stand-in's value can't be had any more."""
    return FollowError(
        "what one of several equal blocks returns, which run as one loop, is used by something "
        'other than the next block in a way that can\'t be followed. Set "spmd": {"scan": "off"}'
    )
