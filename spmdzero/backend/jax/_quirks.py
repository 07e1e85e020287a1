"""Where JAX's operations differ from torch's: see `spmdzero.backend.replica.Quirks`."""

from collections.abc import Callable
from typing import Any

from spmdzero.backend.replica import PRODUCTS, mixed_dtypes


class JaxQuirks:
    """None but one: the operations are torch's, and torch's meta kernels tell their results."""

    def unsupported(self, func: Any, args: tuple[Any, ...]) -> str | None:
        """Why torch refuses it where meta kernels don't.

        What the table lacks is refused where it is recorded.
        """
        return mixed_dtypes(func, args) if func in PRODUCTS else None

    def batch_norm(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a BatchNorm returns; it writes its running statistics."""
        return func(*args, **kwargs)

    def made(self, result: Any) -> Any:
        """The same."""
        return result
