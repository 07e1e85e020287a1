"""Functional aten ops on jax arrays: `lowering` maps an overload to its function."""

import importlib
import pkgutil

from spmdzero.backend.jax.ops._dtypes import Number, default_dtype_is, jax_dtype, torch_dtype
from spmdzero.backend.jax.ops._table import UnsupportedError, lowering, table

__all__ = [
    "Number",
    "UnsupportedError",
    "default_dtype_is",
    "jax_dtype",
    "lowering",
    "table",
    "torch_dtype",
]

# Importing the module of a family enters its ops into the table.
for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
