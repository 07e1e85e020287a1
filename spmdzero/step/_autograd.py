"""Reads and sets the gradients that autograd itself keeps, which the engine takes over."""

from collections.abc import Iterable

import torch

Named = tuple[str, torch.nn.Parameter]


def autograd_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that autograd summed into a parameter, even if its class overrides `grad`."""
    return torch.Tensor.grad.__get__(parameter)  # type: ignore[missing-attribute]


def parameters_with_grad(parameters: Iterable[Named]) -> list[Named]:
    """The named parameters into which autograd itself has summed a gradient."""
    # A subclass of torch's tensors would run Python for each parameter, at each step.
    get = torch.Tensor.grad.__get__  # type: ignore[missing-attribute]
    with torch._C.DisableTorchFunctionSubclass():
        return [named for named in parameters if get(named[1]) is not None]


def set_autograd_grad(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Sets the gradient that `autograd_grad` returns."""
    torch.Tensor.grad.__set__(parameter, value)  # type: ignore[missing-attribute]
