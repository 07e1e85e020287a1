"""Makes models and batches from their descriptions on the command line."""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain import made_up

_SHAPE = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dims>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")


def load_object(name: str) -> Callable[..., Any]:
    """The function named by ``module:function``; modules of the current folder are found too.

    Raises:
        SpmdZeroUsageError: the name is malformed, or there is no such module or function.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise SpmdZeroUsageError(f"{name!r}: write module:function, such as my_package.model:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        raise SpmdZeroUsageError(
            f"{name!r}: {missing}. Run it where `import {module_name}` works"
        ) from missing
    found = getattr(module, attribute, None)
    if not callable(found):
        raise SpmdZeroUsageError(f"{name!r}: {module_name} has no function {attribute}")
    return found


def made_by(name: str) -> Any:
    """Calls the function named by ``module:function`` without arguments, and returns its result.

    Raises:
        SpmdZeroUsageError: as `load_object`, or it wants arguments.
    """
    function = load_object(name)
    try:
        wanted = inspect.signature(function).parameters.values()
    except ValueError:  # C++ tells of no arguments.
        wanted = []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in wanted if p.default is p.empty and p.kind not in kinds]
    if needed:
        module, _, called = name.partition(":")
        raise SpmdZeroUsageError(
            f"{name!r}: {called} wants arguments ({', '.join(needed)}), and is called without any. "
            "Write a function without arguments that returns it, such as "
            f"`def build(): return {called}({needed[0]}=...)` in {module}, and name {module}:build"
        )
    return function()


def make_batch(described: Sequence[str]) -> Any:
    """A batch of one forward, made from shapes or by a function that returns it.

    Args:
        described: one ``module:function``; or shapes such as ``x=8x128:int64``, ``8x10``: a name
            (all inputs have one, or none), the dims, a torch dtype (float32 if left out). Integers
            are zeros, so that they are valid indices; other numbers are normal draws.

    Raises:
        SpmdZeroUsageError: a description is neither a shape nor one function, or the function
            wants arguments.
    """
    if len(described) == 1 and _SHAPE.fullmatch(described[0]) is None:
        return made_by(described[0])
    named: dict[str, torch.Tensor] = {}
    for index, text in enumerate(described):
        found = _SHAPE.fullmatch(text)
        if found is None:
            raise SpmdZeroUsageError(
                f"--batch {text}: write a shape, such as x=8x128:int64 or 8x10, or one "
                "module:function that returns a batch"
            )
        dims = [int(length) for length in found["dims"].split("x")]
        named[found["name"] or str(index)] = _tensor(dims, found["dtype"] or "float32", text)
    if all(name.isdigit() for name in named):
        return tuple(named.values())
    if any(name.isdigit() for name in named):
        raise SpmdZeroUsageError("--batch: name all inputs, as in x=8x128:int64, or none of them")
    return named


def _tensor(dims: list[int], dtype_name: str, text: str) -> torch.Tensor:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise SpmdZeroUsageError(f"--batch {text}: {dtype_name} is no torch dtype")
    return made_up(dims, dtype)
