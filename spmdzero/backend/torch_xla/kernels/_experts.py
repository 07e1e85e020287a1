"""Products of groups of rows, as of a mixture of experts: torch_xla has none."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spmdzero._user_line import user_line
from spmdzero.errors import SpmdZeroRuntimeError

# The first is what transformers counts an expert's tokens with. A newer torch has the third.
_REFUSED = {torch.histc, getattr(torch, "_grouped_mm", None)} | {
    getattr(torch.nn.functional, "grouped_mm", None)
}


class NoGroupedProducts(TorchFunctionMode):
    """Refuses them at the user's line, and names what computes the same.

    torch_xla would run them on the CPU, which has none of these dtypes or can't do it per replica.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs `func`.

        Raises:
            SpmdZeroRuntimeError: it is one of them, of a tensor on the devices.
        """
        if func in _REFUSED and args and args[0].device.type == "xla":
            raise SpmdZeroRuntimeError(
                f"{user_line()}: torch_xla has no {func.__name__}, which a mixture of experts of "
                "transformers calls. Have it multiply otherwise, "
                'model.set_experts_implementation("batched_mm") before initialize, or set '
                '"spmd": {"backend": "jax"}'
            )
        return func(*args, **kwargs or {})
