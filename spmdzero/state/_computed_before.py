"""Refuses tensors that were computed of a parameter before it moved to the devices.

Autograd holds on to the parameter that they were computed of. It could not be exchanged, and they
would keep the old value.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from spmdzero._user_line import user_line
from spmdzero.backend import old_norm_error, old_norms
from spmdzero.errors import SpmdZeroUsageError

_LINE = "initialize"


def refuse_old_weight_norm(module: nn.Module) -> None:
    """Refuses `torch.nn.utils.weight_norm`, which computes a weight before each forward.

    Raises:
        SpmdZeroUsageError: a submodule has it.
    """
    for prefix, part in module.named_modules():
        for name, norm in old_norms(part).items():
            # spectral_norm has nothing of autograd in its attribute before the first forward.
            if norm == "weight_norm":
                path = f"{prefix}.{name}" if prefix else name
                raise SpmdZeroUsageError(
                    f"{user_line(otherwise=_LINE)}: {old_norm_error(path, norm)}"
                )


def refuse_held(module: nn.Module, name: str, parameter: torch.Tensor) -> None:
    """Refuses a parameter that a graph of autograd holds, and says what was computed of it.

    Raises:
        SpmdZeroUsageError: always.
    """
    found = next(_computed_of(module, parameter), None)
    if found is None:
        what = (
            "something that was computed of it with gradients before initialize is still there, "
            "such as a penalty (sum(p.square().sum() for p in model.parameters())). Compute it "
            "after initialize, in the loss, or let go of it first (del penalty)"
        )
    else:
        what = (
            f"the attribute {found} was computed of it before initialize, and would keep its old "
            "value while it trains. Compute it in the forward"
        )
    raise SpmdZeroUsageError(
        f"{user_line(otherwise=_LINE)}: {name} can't move to the devices: {what}"
    )


def _computed_of(module: nn.Module, parameter: torch.Tensor) -> Iterator[str]:
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and _reaches(value.grad_fn, parameter):
                yield repr(f"{prefix}.{name}" if prefix else name)


def _reaches(node: Any, parameter: torch.Tensor) -> bool:
    left, seen = [node], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) is parameter:
            return True
        left += [following for following, _ in node.next_functions]
    return False
