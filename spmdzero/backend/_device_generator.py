"""`torch.Generator` for the mesh's devices: torch has none for a device of their type."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from spmdzero._replaced import REPLACED

_Plain = torch.Generator
# From torch 2.13 on its class has a class of its own.
_PlainKind: Any = type(_Plain)


class _Kind(_PlainKind):
    """The class of `Generator`: torch's own generators are instances of it."""

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, _Plain)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, _Plain)


@functools.cache
def take_over_generator(devices: Callable[[], torch.device]) -> None:
    """Makes `torch.Generator(device=...)` take the mesh's devices, for which it has none.

    It returns a generator of the CPU, which says so. What it draws for the devices is drawn on the
    host, by torch's own kernels, and moved.

    Args:
        devices: returns the device of tensors on the mesh.
    """

    class Generator(_Plain, metaclass=_Kind):
        __doc__, __module__, __qualname__ = _Plain.__doc__, "torch", "Generator"

        def __new__(cls, device: Any = "cpu") -> torch.Generator:
            mine = torch.device(device).type == devices().type
            return _Plain("cpu" if mine else device)

    torch.Generator = Generator  # type: ignore[misc]
    REPLACED["torch.Generator"] = "C++ has no generator for a device of the type of the devices"
