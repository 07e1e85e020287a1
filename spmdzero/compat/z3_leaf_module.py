"""`deepspeed.utils.z3_leaf_module`: flags that tell ZeRO-3 where to stop, which nothing reads.

Set and found as in DeepSpeed, so that scripts which mark their mixture-of-experts blocks run.
"""

from collections.abc import Iterable

import torch
from torch import nn

from spmdzero.errors import SpmdZeroUsageError


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is flagged."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: torch.Tensor) -> bool:
    """False: ZeRO-3 never partitioned this parameter."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The flagged modules of `model`."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Flags one module, or takes its flag away."""
    model._z3_leaf = flag  # type: ignore[assignment]


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: list[type] | list[str],
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Flags modules by class, or by its name with or without its module's; returns them.

    Raises:
        SpmdZeroUsageError: none was found, and `raise_if_not_found`.
    """
    return _flag_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Takes the flag from modules of some classes; as `set_z3_leaf_modules` otherwise."""
    return _flag_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: list[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Flags modules by their names in `named_modules()`; returns them, and names not found.

    Raises:
        SpmdZeroUsageError: a name was not found, and `raise_if_not_found`.
    """
    named = dict(model.named_modules())
    missing = [name for name in module_names if name not in named]
    return _flagged(
        [named[n] for n in module_names if n in named], missing, flag, raise_if_not_found
    )


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: list[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Flags modules by the ends of their names; returns them, and suffixes not found.

    Raises:
        SpmdZeroUsageError: a suffix was not found, and `raise_if_not_found`.
    """
    found = {
        suffix: [m for name, m in model.named_modules() if name.endswith(suffix)]
        for suffix in module_name_suffixes
    }
    missing = [suffix for suffix, modules in found.items() if not modules]
    unique = {id(m): m for modules in found.values() for m in modules}
    return _flagged(unique.values(), missing, flag, raise_if_not_found)


def _flag_classes(
    model: nn.Module, classes: list[type] | list[str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    found = [
        module
        for module in model.modules()
        if any(
            isinstance(module, wanted)
            if isinstance(wanted, type)
            else wanted in (type(module).__name__, _qualified(module))
            for wanted in classes
        )
    ]
    if not found and raise_if_not_found:
        raise SpmdZeroUsageError(f"no modules of type {classes} found in the model")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _flagged(
    modules: Iterable[nn.Module], missing: list[str], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    modules = list(modules)
    if missing and raise_if_not_found:
        raise SpmdZeroUsageError(f"no modules named {missing} found in the model")
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules, missing


def _qualified(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
