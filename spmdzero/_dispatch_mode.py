"""torch's dispatch modes, as spmdzero uses them, and what they see of an operation."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd


class DispatchMode(TorchDispatchMode):
    """A mode that sees the same operations in inference mode and outside of it.

    Its calls don't import torch's compiler, which takes a second of each start: from torch 2.14 on
    each mode's first call would import it, so that it leaves the mode out.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        """Hands `operation` what autograd would have handed on."""
        kernel = composed(func)
        if kernel is None:
            return self.operation(func, args, kwargs or {})
        # torch turns a mode off during its own call. A subclass may enter more than the mode.
        TorchDispatchMode.__enter__(self)
        try:
            return kernel(*args, **(kwargs or {}))
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers an operation that torch doesn't compose of others."""
        raise NotImplementedError


@functools.cache
def composed(func: Any) -> Callable[..., Any] | None:
    """torch's kernel of an operation that is others in autograd's eyes; None for any other.

    Autograd runs that kernel. Where it is left out, as in inference mode, a dispatch gets the
    operation itself: a dropout, a whole LSTM.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return None
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    # torch_xla has kernels of its own for some of them, as for linear, which autograd lets through.
    if not has(_COMPOSED.name) or has("CPU") or has("XLA"):
        return None
    return functools.partial(func._op_dk, _COMPOSED)
