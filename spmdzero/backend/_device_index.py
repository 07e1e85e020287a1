"""A number in the place of a device, as `engine.local_rank`, which torch takes for one of CUDA's.

There is no number that torch's C++ code takes for another device: it isn't asked.
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
    """`tensor.to` or `module.to`, to which 0 is the devices."""

    @functools.wraps(move)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int):
            args = (_of_devices(args[0], devices), *args[1:])
        elif isinstance(kwargs.get("device"), int):
            kwargs["device"] = _of_devices(kwargs["device"], devices)
        return move(self, *args, **kwargs)

    return to


def _making(make: Callable[..., Any], devices: Callable[[], torch.device]) -> Callable[..., Any]:
    """`torch.tensor`, to which `device=0` is the devices."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = _of_devices(kwargs["device"], devices)
        return make(*args, **kwargs)

    return made


@functools.cache
def take_over(devices: Callable[[], torch.device]) -> None:
    """Has torch take a local rank for the devices, and say what to write where it can't.

    It can where Python is asked first: `tensor.to`, `module.to`, `torch.tensor`, `torch.as_tensor`.
    What makes tensors otherwise, as `torch.zeros`, is found by TorchScript by its identity.

    Args:
        devices: where tensors live that the mesh holds.
    """
    for owner in (torch.Tensor, nn.Module):
        owner.to = _moving(owner.to, devices)  # type: ignore[method-assign]
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _making(getattr(torch, name), devices))
    # C++ calls it by this name before it makes a tensor of CUDA's.
    begin = torch.cuda._lazy_init

    @functools.wraps(begin)
    def explained() -> None:
        try:
            begin()
        except (AssertionError, RuntimeError) as error:
            raise type(error)(
                f"{error}\n{user_line(otherwise=_LINE)}: spmdzero trains on engine.device "
                f"({devices()}). Use .to(engine.device) in the place of .cuda() and .to('cuda'), "
                "and device=engine.device; a local rank is a device to tensor.to, module.to, "
                "torch.tensor and torch.as_tensor alone"
            ) from error

    torch.cuda._lazy_init = explained
