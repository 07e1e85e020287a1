"""`deepspeed.utils.z3_leaf_module`: flags that tell DeepSpeed's ZeRO-3 hooks where to stop.

The flags are set and found as in DeepSpeed, so that scripts which mark their mixture-of-experts
blocks run. No code reads the flags: a parameter is gathered where an operation uses it, and no
module is hooked.
"""

import torch
from torch import nn

from spmdzero._logging import log_once
from spmdzero.errors import SpmdZeroUsageError


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is flagged."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: torch.Tensor) -> bool:
    """False: the operation that uses a parameter decides about gathering, not its module."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The flagged modules of `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Flags one module, or removes its flag."""
    log_once(
        "set_z3_leaf_module() flags modules and has no other effect: a parameter is gathered where "
        "an operation uses it"
    )
    model._z3_leaf = flag  # type: ignore[assignment]


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: list[type] | list[str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Flags modules by class, or by the class's name or dotted path; returns the modules.

    Raises:
        SpmdZeroUsageError: no module was found, and `raise_if_not_found`.
    """
    return _flag_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Removes the flag from modules of some classes; otherwise as `set_z3_leaf_modules`."""
    return _flag_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: list[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Flags modules by their names in `named_modules()`; returns modules, and missing names.

    Raises:
        SpmdZeroUsageError: a name was not found, and `raise_if_not_found`.
    """
    modules = dict(model.named_modules())
    named = {name: [modules[name]] if name in modules else [] for name in module_names}
    return _flag(named, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: list[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Flags modules by the ends of their names; returns modules, and missing suffixes.

    Raises:
        SpmdZeroUsageError: a suffix was not found, and `raise_if_not_found`.
    """
    named = {
        suffix: [m for name, m in model.named_modules() if name.endswith(suffix)]
        for suffix in module_name_suffixes
    }
    return _flag(named, flag, raise_if_not_found)


def _flag(
    named: dict[str, list[nn.Module]], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    missing = [name for name, modules in named.items() if not modules]
    if missing and raise_if_not_found:
        raise SpmdZeroUsageError(f"no modules named {missing} found in the model")
    found = list(dict.fromkeys(module for modules in named.values() for module in modules))
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


def _flag_classes(
    model: nn.Module, classes: list[type] | list[str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    def wanted(cls: type) -> bool:
        names = (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
        return any(issubclass(cls, w) if isinstance(w, type) else w in names for w in classes)

    found = [module for module in model.modules() if wanted(type(module))]
    if not found and raise_if_not_found:
        raise SpmdZeroUsageError(f"no modules of type {classes} found in the model")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found
