"""The contexts of torch_xla's backend around a module: see `spmdzero.backend.replica.Around`."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from spmdzero._logging import log_once
from spmdzero.backend.attention import masks_without_reading
from spmdzero.backend.protocols._region import AttentionCall, Recompute
from spmdzero.backend.replica import PRODUCTS, RecomputedBlocks, kept_on_host, mixed_dtypes
from spmdzero.backend.replica._around import Provided
from spmdzero.backend.torch_xla import runtime
from spmdzero.backend.torch_xla.kernels import TorchsCalls, TorchsNorms

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


def autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """`torch.autocast` in `dtype` for tensors on the devices; None changes nothing."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type="xla", dtype=dtype)


class TorchXlaAround:
    """Autocast, recomputation and torch's norms around a module.

    Args:
        module: the module whose forward runs.
        autocast: dtype of `torch.autocast` around the module's forward, None for none.
        recompute: which blocks run again in backward, and their policy, see `RecomputedBlocks`.
        keep_on_host: whether what runs again keeps its inputs in the host's memory until backward.

    Attributes:
        quirks, attention, recomputed, keeps_tensors: see `Around`.
    """

    # XLA would abort the process where a global tensor is used in the region.
    keeps_tensors = False

    def __init__(
        self,
        module: nn.Module,
        *,
        autocast: torch.dtype | None = None,
        recompute: Recompute = "nothing",
        keep_on_host: bool = False,
    ) -> None:
        self.quirks = TorchXlaQuirks()
        self._module, self._autocast = module, autocast
        self.recomputed = RecomputedBlocks(module, recompute)
        self._keep_on_host = keep_on_host
        # The kernels are JAX's: attention is plain products here.
        self.attention: tuple[AttentionCall, ...] = ()

    @contextlib.contextmanager
    def forward(self, provided: Provided, *, loops: bool) -> Iterator[None]:
        """Context around a forward in the region."""
        if runtime.program_platform() == "TPU":
            log_once("attention is computed as plain products: its kernels are the JAX backend's")
        with (
            TorchsNorms(),
            TorchsCalls(),
            masks_without_reading(self._module),
            autocast(self._autocast),
            self.recomputed(),
            kept_on_host(self._keep_on_host),
        ):
            yield

    @contextlib.contextmanager
    def global_forward(self) -> Iterator[None]:
        """Context around a forward in global space."""
        with (
            TorchsNorms(),
            TorchsCalls(),
            masks_without_reading(self._module),
            autocast(self._autocast),
            kept_on_host(self._keep_on_host),
        ):
            yield

    def finish(self, output: Any) -> Any:
        """The module's output, as tensors that can be computed with."""
        return output

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Context around the backward of a forward in the region."""
        with TorchsNorms(), TorchsCalls(), masks_without_reading(self._module):
            yield

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Says that it isn't known: each step is recorded, and may read another."""
        return False

    def is_same_everywhere(self, tensor: torch.Tensor) -> bool:
        """Says that it isn't known: no tensor is kept."""
        return False
