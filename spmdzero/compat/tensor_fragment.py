"""`deepspeed.utils.safe_*`: one parameter's fp32 weights, gradient and optimizer states.

The functions work for every param group; DeepSpeed's find optimizer states of the first only.

``as_dtensor=True`` is spmdzero's: a DTensor in the host's memory, cut over hosts as those of
`engine.distributed_state()`. Every host calls the function then. `safe_set_full_*` take DTensors.
"""

from collections.abc import Callable
from typing import Any

import torch

from spmdzero.engine import trained_parameter
from spmdzero.errors import SpmdZeroUsageError


def safe_get_full_fp32_param(
    param: torch.Tensor, *, as_dtensor: bool = False
) -> torch.Tensor | None:
    """The fp32 weights that the optimizer updates, `[*shape]` on the device.

    It is None for a parameter that no engine trains.
    """
    trained = trained_parameter(param)
    if trained is None:
        return None
    return trained.read_dtensor("master") if as_dtensor else trained.read_master()


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replaces the weights `[*shape]`: the fp32 master, and the parameter cast to its dtype.

    DeepSpeed's forward sees the new weights only after the next step; here it sees them at once.
    The call does nothing for a parameter that no engine trains, as in DeepSpeed.

    Raises:
        SpmdZeroUsageError: `value` has a different shape.
    """
    if trained := trained_parameter(param):
        trained.write_master(value)


def safe_get_full_optimizer_state(
    param: torch.Tensor, optim_state_key: str, *, as_dtensor: bool = False
) -> torch.Tensor | None:
    """One optimizer state, e.g. ``"exp_avg"``, `[*shape]` fp32 on the device.

    It is None for a parameter that no engine trains.

    Raises:
        SpmdZeroUsageError: the optimizer keeps no such state; the message names the states it
            keeps.
    """
    trained = trained_parameter(param)
    if trained is None:
        return None
    read = trained.read_dtensor if as_dtensor else trained.read_state
    return read(optim_state_key)


def safe_set_full_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Replaces one optimizer state, `[*shape]`.

    Raises:
        SpmdZeroUsageError: there is no such state, or `value` has a different shape.
    """
    if trained := trained_parameter(param):
        trained.write_state(optim_state_key, value)


def safe_get_full_grad(param: torch.Tensor, *, as_dtensor: bool = False) -> torch.Tensor | None:
    """The averaged gradient, `[*shape]` on the device, between `backward` and `step`.

    It is the same tensor as `param.grad`, or None without a gradient; a copy with `as_dtensor`.

    Raises:
        SpmdZeroUsageError: `as_dtensor`, and no engine trains the parameter.
    """
    trained = trained_parameter(param)
    if trained is not None:
        return trained.read_dtensor("gradient") if as_dtensor else trained.read_gradient()
    if as_dtensor:
        raise SpmdZeroUsageError(
            "safe_get_full_grad(as_dtensor=True): no engine trains this parameter, so nothing says "
            "which hosts share its gradient. Read param.grad, or give a parameter of engine.module"
        )
    return param.grad


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replaces the gradient `[*shape]` that the next step uses.

    Raises:
        SpmdZeroUsageError: `value` has a different shape.
    """
    if trained := trained_parameter(param):
        trained.write_gradient(value)
    elif param.grad is not None:
        param.grad.copy_(value)


def safe_update_full_grad_vectorized(
    param_list: list[Any], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Replaces each parameter's gradient by `update_func(gradient, parameter)`.

    Parameters without a gradient are left out.
    """
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))
