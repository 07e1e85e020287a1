"""Device numbers, such as `engine.local_rank`, which torch takes for numbers of CUDA devices.

torch's C++ code always takes a number for a CUDA device, and can't be told otherwise.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spmdzero._replaced import in_place_of
from spmdzero._user_line import user_line
from spmdzero.errors import SpmdZeroUsageError

_LINE = "this call"
_BECAUSE = "C++ takes a number for a CUDA device, and here a local rank, 0, is the devices"


def _of_devices(device: int, devices: Callable[[], torch.device]) -> Any:
    if isinstance(device, bool):
        return device
    if device != 0:
        raise SpmdZeroUsageError(
            f"{user_line(otherwise=_LINE)}: device {device} of a process that drives all devices "
            "of its host as one, whose local rank is 0. Use engine.device"
        )
    return devices()


@functools.cache
def take_over(
    devices: Callable[[], torch.device], making: Callable[..., Any] | None = None
) -> None:
    """Makes torch accept a local rank for the devices; elsewhere `spmdzero._cuda` says what to do.

    `tensor.to`, `module.to`, `torch.tensor` and `torch.as_tensor` accept it. TorchScript finds
    other factories, as `torch.zeros`, in its own code, not by Python's: they stay.

    Args:
        devices: returns the device of tensors on the mesh.
        making: calls its first argument, `torch.tensor` or `torch.as_tensor`, with the others,
            where the backend can't leave that to torch.
    """

    def moving(move: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int | str | torch.device):
            args = (_indexed(args[0], devices), *args[1:])
        elif kwargs.get("device") is not None:
            kwargs["device"] = _indexed(kwargs["device"], devices)
        return move(self, *args, **kwargs)

    def made(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = _of_devices(kwargs["device"], devices)
        return make(*args, **kwargs) if making is None else making(make, *args, **kwargs)

    for owner in (torch.Tensor, nn.Module):
        in_place_of(owner, "to", because=_BECAUSE)(moving)
    for name in ("tensor", "as_tensor"):
        in_place_of(torch, name, because=_BECAUSE)(made)


def _indexed(
    device: int | str | torch.device, devices: Callable[[], torch.device]
) -> int | str | torch.device:
    """`device` with the index without which C++ may not know the devices."""
    if isinstance(device, int):
        return _of_devices(device, devices)
    known = torch.device(device)
    if known.index is not None or known.type == "cpu":
        return device
    return devices() if known.type == devices().type else device
