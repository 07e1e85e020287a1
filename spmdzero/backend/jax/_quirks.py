"""Where JAX's operations differ from torch's: see `spmdzero.backend.replica.Quirks`."""

from collections.abc import Callable
from typing import Any


class JaxQuirks:
    """None: the operations are torch's."""

    def unsupported(self, func: Any, args: tuple[Any, ...]) -> str | None:
        """None: what the table lacks is refused where it is recorded."""
        return None

    def batch_norm(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a BatchNorm returns; it writes its running statistics."""
        return func(*args, **kwargs)

    def made(self, result: Any) -> Any:
        """The same."""
        return result
