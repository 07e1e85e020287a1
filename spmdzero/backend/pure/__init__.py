"""Runs the user's Python on stand-ins, and finds out whether it would do the same again.

It would not if it reads a value, draws random numbers other than keys, keeps a tensor, or writes to
its module. What it changed is put back.
"""

from spmdzero.backend.pure._module_watch import HOOKS, ModuleWatch, device_attributes, package_of
from spmdzero.backend.pure._traces import (
    Folds,
    GeneratorWatch,
    ImpureError,
    attempt,
    fold_python,
    same_constants,
)

__all__ = [
    "HOOKS",
    "Folds",
    "GeneratorWatch",
    "ImpureError",
    "ModuleWatch",
    "attempt",
    "device_attributes",
    "fold_python",
    "package_of",
    "same_constants",
]
