"""Outputs of blocks that haven't run yet."""

from collections.abc import Callable
from typing import Any

import torch

from spmdzero.backend._current import runtime
from spmdzero.backend.forms._tree import map_tensors
from spmdzero.backend.replica import FollowError

_DEVICE = vars(torch._C.TensorBase)["device"].__get__
_GETTERS = ("shape", "dtype", "layout", "ndim", "requires_grad", "is_meta")
# Functions that read the form of a tensor, but not its values.
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
    """A tensor that gets its value when it takes part in a computation.

    It is a leaf that requires a gradient: a use that bypasses torch's functions, as by an autograd
    Function of the user's, then raises in backward, and no gradient is lost.
    """

    _value: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, like: torch.Tensor, value: Callable[[], torch.Tensor]) -> "StandIn":
        """A stand-in with the form of `like`; `value` returns its real value."""
        with torch._C.DisableTorchFunctionSubclass():
            # This is the device that C++ sees, which may have another name there.
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
        """Answers questions about the form; runs anything else on the value."""
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
        """Handles uses that bypass torch's functions: they can only get a copy of the handle."""
        if func is torch.ops.aten.detach.default:
            (given,) = args
            return cls.of(given, given._value)
        raise followed_error()


def made_real(tree: Any) -> Any:
    """A copy of `tree` with the value of each `StandIn`."""
    return map_tensors(
        tree, lambda _, found: found._value() if isinstance(found, StandIn) else found
    )


def _refuse(_: torch.Tensor) -> None:
    raise followed_error()


def followed_error() -> FollowError:
    """The error about a stand-in whose value can't be computed any more."""
    return FollowError(
        "what one of several equal blocks returns, which run as one loop, is used by something "
        'other than the next block in a way that can\'t be followed. Set "spmd": {"scan": "off"}'
    )
