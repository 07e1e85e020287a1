"""Finds reasons to run a micro-batch's Python, which keep it from being replayed."""

from collections.abc import Iterable

import torch
from torch import nn

from spmdzero.engine._clients_optimizer import has_step_hooks
from spmdzero.engine._launching import Launching
from spmdzero.state._training import Training

OBSERVED = "somebody reads the step's program"
"""The reason if an audit, a record of ledgers or a profile observes the step."""


def block(
    training: Training, launching: Launching, parameters: Iterable[torch.Tensor]
) -> str | None:
    """Why the coming micro-batch has to be traced even if its kind was captured, or None."""
    if launching.observers:
        return OBSERVED
    if training.spmd_config.wall_clock_breakdown:
        return "wall_clock_breakdown times forward, backward and step apart"
    if any(launching.hooks) or nn.modules.module._has_any_global_hook():
        return "a hook of the engine, or of all modules, has to run at each step"
    # A subclass of torch's tensors would run Python for each parameter, at each step.
    with torch._C.DisableTorchFunctionSubclass():
        if [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]:
            return "a parameter has a gradient hook"
    if training.optimizer is not None and has_step_hooks(training.optimizer):
        return "a hook of the optimizer has to run at each step"
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "a torch dispatch or function mode watches operations"
    if torch.is_anomaly_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False):
        return "autograd is watched, by detect_anomaly or saved_tensors_hooks"
    return None if torch.is_grad_enabled() else "autograd is off"
