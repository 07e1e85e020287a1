"""Python objects by the name that the command line gives them."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from spmdzero.errors import SpmdZeroUsageError


def load_object(name: str) -> Callable[..., Any]:
    """What ``module:function`` names; modules of the current folder are found too.

    Raises:
        SpmdZeroUsageError: not of that form, no such module, or nothing callable in it.
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
