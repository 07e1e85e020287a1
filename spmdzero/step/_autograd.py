"""The gradients that autograd itself keeps, which the engine takes over."""

from collections.abc import Iterable

import torch

Named = tuple[str, torch.nn.Parameter]


def autograd_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """What autograd itself summed into a parameter, whatever its class calls `grad`."""
    return torch.Tensor.grad.__get__(parameter)  # type: ignore[missing-attribute]


def parameters_with_grad(parameters: Iterable[Named]) -> list[Named]:
    """Those of named parameters of which autograd itself has summed a gradient."""
    # A subclass would be asked for an answer to each, at each step.
    with torch._C.DisableTorchFunctionSubclass():
        return [named for named in parameters if autograd_grad(named[1]) is not None]


def set_autograd_grad(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Sets what `autograd_grad` returns."""
    torch.Tensor.grad.__set__(parameter, value)  # type: ignore[missing-attribute]
