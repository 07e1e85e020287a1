"""Finds the gradients that are communicated in autocast's dtype."""

import importlib

import torch
from torch import nn

from spmdzero.config import TorchAutocastConfig
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.precision import PrecisionPolicy

# DeepSpeed's list (runtime/torch_autocast.py).
_SAFE: tuple[type, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def autocast_wire(
    module: nn.Module, config: TorchAutocastConfig, precision: PrecisionPolicy
) -> dict[str, torch.dtype]:
    """Parameter name -> dtype, for parameters of the modules that are safe in lower precision.

    As in DeepSpeed a module is safe by its exact class: a subclass of nn.Linear is not safe.

    Raises:
        SpmdZeroConfigError: a path in `lower_precision_safe_modules` names no class.
    """
    if precision.autocast is None:
        return {}
    safe = _SAFE
    if config.lower_precision_safe_modules is not None:
        safe = tuple(_class_named(path) for path in config.lower_precision_safe_modules)
    return {
        f"{prefix}.{name}" if prefix else name: precision.autocast
        for prefix, part in module.named_modules()
        if type(part) in safe
        for name, _ in part.named_parameters(recurse=False)
    }


def _class_named(path: str) -> type:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None) if module else None
    except ImportError:
        found = None
    if not isinstance(found, type):
        raise SpmdZeroConfigError(
            key="torch_autocast.lower_precision_safe_modules",
            value=path,
            reason="there is no class at this path",
            fix='Write full paths, such as "torch.nn.Linear".',
        )
    return found
