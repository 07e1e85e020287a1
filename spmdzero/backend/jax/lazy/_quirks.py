"""Differences between JAX's operations and torch's: see `spmdzero.backend.replica.Quirks`."""

from collections.abc import Callable
from typing import Any

from spmdzero.backend.replica import PRODUCTS, mixed_dtypes


class JaxQuirks:
    """Few differences: the operations are torch's, and its meta kernels give their results."""

    def unsupported(self, func: Any, args: tuple[Any, ...]) -> str | None:
        """The reason why torch refuses the operation, where its meta kernels don't.

        Operations that the table lacks are refused where they are recorded.
        """
        return mixed_dtypes(func, args) if func in PRODUCTS else None

    def batch_norm(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a BatchNorm, which writes its running statistics."""
        return func(*args, **kwargs)

    def made(self, result: Any) -> Any:
        """The result itself."""
        return result
