"""What every monitor does."""

import importlib
from types import ModuleType
from typing import Protocol

from spmdzero.errors import SpmdZeroConfigError

Scalar = tuple[str, float, int]
"""Name such as ``"Train/Samples/lr"``, value, samples of all devices so far."""


class Monitor(Protocol):
    """One place that scalars are written to."""

    def write(self, scalars: list[Scalar]) -> None:
        """Writes the scalars in their order."""

    def close(self) -> None:
        """Ends the record; nothing is written afterwards."""


def library(name: str, *, section: str) -> ModuleType:
    """Imports what a monitor needs.

    Raises:
        SpmdZeroConfigError: it is not installed; names the extra that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SpmdZeroConfigError(
            key=f"{section}.enabled",
            value=True,
            reason=f"this monitor needs a package that is not installed ({error})",
            fix=f"Install it: pip install 'spmdzero[{section}]', or write false.",
        ) from None
