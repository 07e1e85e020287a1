"""Device numbers, such as `engine.local_rank`, which torch takes for numbers of CUDA devices.

torch's C++ code always takes a number for a CUDA device, and can't be told otherwise.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spmdzero._user_line import user_line
from spmdzero.errors import SpmdZeroUsageError

_LINE = "this call"


def _of_devices(device: int, devices: Callable[[], torch.device]) -> Any:
    if isinstance(device, bool):
        return device
    if device != 0:
        raise SpmdZeroUsageError(
            f"{user_line(otherwise=_LINE)}: device {device} of a process that drives all devices "
            "of its host as one, whose local rank is 0. Use engine.device"
        )
    return devices()


def _moving(move: Callable[..., Any], devices: Callable[[], torch.device]) -> Callable[..., Any]:
    """Wraps `tensor.to` or `module.to`, so that 0 means the mesh's devices."""

    @functools.wraps(move)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int):
            args = (_of_devices(args[0], devices), *args[1:])
        elif isinstance(kwargs.get("device"), int):
            kwargs["device"] = _of_devices(kwargs["device"], devices)
        return move(self, *args, **kwargs)

    return to


def _making(make: Callable[..., Any], devices: Callable[[], torch.device]) -> Callable[..., Any]:
    """Wraps `torch.tensor` or its like, so that `device=0` means the mesh's devices."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = _of_devices(kwargs["device"], devices)
        return make(*args, **kwargs)

    return made


@functools.cache
def take_over(devices: Callable[[], torch.device]) -> None:
    """Makes torch accept a local rank for the devices; elsewhere `spmdzero._cuda` says what to do.

    `tensor.to`, `module.to`, `torch.tensor` and `torch.as_tensor` accept it, as they can be wrapped
    in Python. TorchScript finds other factories, as `torch.zeros`, by identity: they stay.

    Args:
        devices: returns the device of tensors on the mesh.
    """
    for owner in (torch.Tensor, nn.Module):
        owner.to = _moving(owner.to, devices)  # type: ignore[method-assign]
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _making(getattr(torch, name), devices))
