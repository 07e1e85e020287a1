"""Differences between torch_xla's operations and torch's in a replica region: see `Quirks`."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from spmdzero.backend.replica import PRODUCTS, mixed_dtypes

_aten = torch.ops.aten


class TorchXlaQuirks:
    """The differences of torch_xla 2.9."""

    def unsupported(self, func: Any, args: tuple[Any, ...]) -> str | None:
        """The reason why `func` can't run on these: it would end the process, or run on the CPU."""
        # torch_xla accepts mixed dtypes, and later XLA's verifier fails on the whole program.
        if func in PRODUCTS or func is _aten.native_batch_norm.default:
            mixed = mixed_dtypes(func, args)
            if mixed is not None:
                return mixed
        if not _has_lowering(func):
            return (
                f"torch_xla has no lowering of {func} and would run it on the CPU, which can't be "
                'done per replica. Rewrite it with other operations, or set "spmd": {"forward": '
                '"global"} to run the forward outside of the replica region'
            )
        return None

    def batch_norm(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a BatchNorm; its running statistics become those that torch computes."""
        outputs = func(*args, **kwargs)
        x, _, running_var, training, momentum, eps = args[0], *args[3:8]
        if training and running_var is not None:
            # torch_xla averages the biased variance into running_var, torch the unbiased one.
            count = x.numel() // x.shape[1]
            biased = outputs[2].pow(-2) - eps
            running_var.add_(biased * (momentum / (count - 1)))
        return outputs

    def made(self, result: Any) -> Any:
        """The result of a factory on the devices, such that writes through its views reach it.

        torch wraps the results of all other operations for this. torch_xla wraps results of
        factories, but not below a dispatch mode.
        """
        if isinstance(result, torch.Tensor) and result.device.type == "xla":
            return result if torch._is_functional_tensor(result) else _lifted(result)
        return result


def _lifted(tensor: torch.Tensor) -> torch.Tensor:
    return _aten.lift_fresh.default(tensor)


@functools.cache
def _has_lowering(func: Any) -> bool:
    name = func.name()
    return not name.startswith("aten::") or any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        for key in ("XLA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    )
