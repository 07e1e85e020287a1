"""Environment variables that a backend's library sets for itself, which child processes don't get.

Libraries set them while they are imported and read them until the devices have started. Another
program that this process starts would take them for the user's wish.
"""

import contextlib
import os
from collections.abc import Iterator

# TF_CPP_MIN_LOG_LEVEL is not among them: XLA reads it at its first message, which may be that of
# any later compilation, and would then say what nobody can change.
_NAMES = ("JAX_PLATFORMS", "TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY")
_noted: dict[str, str] = {}


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Context whose variables `take_back` removes, unless they were set before it."""
    before = {name for name in _NAMES if name in os.environ}
    try:
        yield
    finally:
        for name in _NAMES:
            if name in os.environ and name not in before:
                _noted[name] = os.environ[name]


def take_back() -> None:
    """Removes the noted variables that still have the values that the library gave them."""
    while _noted:
        name, value = _noted.popitem()
        if os.environ.get(name) == value:
            del os.environ[name]
