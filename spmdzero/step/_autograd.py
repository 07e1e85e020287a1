"""The gradients that autograd itself keeps, which the engine takes over."""

import torch


def autograd_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """What autograd itself summed into a parameter, whatever its class calls `grad`."""
    return torch.Tensor.grad.__get__(parameter)  # type: ignore[missing-attribute]


def set_autograd_grad(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Sets what `autograd_grad` returns."""
    torch.Tensor.grad.__set__(parameter, value)  # type: ignore[missing-attribute]
