"""Private functions of JAX's on which calls rely."""

import inspect
from collections.abc import Mapping
from types import ModuleType


def are_as_known(module: ModuleType, functions: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether functions of `module` have the parameters that were tested.

    Args:
        module: one of JAX's.
        functions: name of a function -> the names of its parameters.
    """
    return all(
        tuple(inspect.signature(getattr(module, name, print)).parameters) == parameters
        for name, parameters in functions.items()
    )
