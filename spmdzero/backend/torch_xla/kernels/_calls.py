"""Calls in a forward that torch_xla can't compute, or computes otherwise than torch."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spmdzero._user_line import user_line
from spmdzero.backend.forms._tree import found, mapped
from spmdzero.backend.torch_xla.kernels._views import kept_apart, require_places
from spmdzero.errors import SpmdZeroRuntimeError

# Products of groups of rows, as in a mixture of experts. transformers counts an expert's tokens
# with the first. Only a newer torch has the third.
_GROUPED = {torch.histc, getattr(torch, "_grouped_mm", None)} | {
    getattr(torch.nn.functional, "grouped_mm", None)
}


class TorchsCalls(TorchFunctionMode):
    """Computes these calls as torch does, or refuses them at the user's line and names what works.

    torch_xla would run grouped products on the CPU, which doesn't support these dtypes or can't
    work per replica. Into an integer `out=` it would write floats, and cut off their digits. For
    views see `kept_apart` and `require_places`.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs `func`.

        Raises:
            SpmdZeroRuntimeError: the call is one of them, on a tensor on the devices.
        """
        if func in _GROUPED and args and args[0].device.type == "xla":
            raise SpmdZeroRuntimeError(
                f"{user_line()}: torch_xla has no {func.__name__}, which a mixture of experts of "
                "transformers calls. Have it multiply otherwise, "
                'model.set_experts_implementation("batched_mm") before initialize, or set '
                '"spmd": {"backend": "jax"}'
            )
        if kwargs and kwargs.get("out") is not None:
            _require_out(func, args, kwargs)
        kwargs = kwargs or {}
        require_places(func, args, kwargs)
        return func(*kept_apart(func, args, kwargs), **kwargs)


def _require_out(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    outs = found(kwargs["out"], torch.Tensor)
    if all(o.device.type != "xla" or o.dtype.is_floating_point or o.dtype.is_complex for o in outs):
        return
    given = mapped((args, kwargs), torch.Tensor, _without_data)
    try:
        with warnings.catch_warnings():
            # torch warns that `out` is resized.
            warnings.simplefilter("ignore")
            func(*given[0], **given[1])
    except NotImplementedError:
        # torch can't tell what the call would return.
        return
    except (RuntimeError, TypeError) as error:
        raise SpmdZeroRuntimeError(
            f"{user_line()}: {func.__name__} with out={[o.dtype for o in outs]}: {error}. Give an "
            "out= of the result's dtype, or take what is returned without out="
        ) from error


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
