"""DTensors that a user hands over, found without importing torch's module of them."""

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Whether `value` is a DTensor."""
    # Importing it takes a second, and where nobody has imported it there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def undistributed(value: torch.Tensor) -> torch.Tensor:
    """`value`, made whole if it is a DTensor: each rank of its mesh has to call this then."""
    return value.full_tensor() if is_dtensor(value) else value
