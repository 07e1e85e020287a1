"""The contexts of torch_xla's backend around a module: see `spmdzero.backend.replica.Around`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from spmdzero.backend.attention import AttentionKernels
from spmdzero.backend.protocols._region import AttentionCall, AttentionChoice, Recompute
from spmdzero.backend.replica import RecomputedBlocks, kept_on_host
from spmdzero.backend.replica._around import Provided
from spmdzero.backend.torch_xla._autocast import autocast
from spmdzero.backend.torch_xla._quirks import TorchXlaQuirks
from spmdzero.backend.torch_xla.attention import KERNELS
from spmdzero.backend.torch_xla.fixed_values import is_fixed
from spmdzero.backend.torch_xla.kernels import TorchsCalls, TorchsNorms


class TorchXlaAround:
    """Kernels, autocast, recomputation and torch's norms around a module.

    Args:
        module: the module whose forward runs.
        autocast: dtype of `torch.autocast` around the module's forward, None for none.
        attention: what computes `scaled_dot_product_attention`, see `AttentionKernels`.
        recompute: which blocks run again in backward, and their policy, see `RecomputedBlocks`.
        keep_on_host: whether what runs again keeps its inputs in the host's memory until backward.

    Attributes:
        quirks, attention, recomputed: see `Around`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        autocast: torch.dtype | None = None,
        attention: AttentionChoice = "auto",
        recompute: Recompute = "nothing",
        keep_on_host: bool = False,
    ) -> None:
        self.quirks = TorchXlaQuirks()
        self._module, self._autocast = module, autocast
        self.recomputed = RecomputedBlocks(module, recompute)
        self._keep_on_host = keep_on_host
        self._attention: AttentionChoice = attention
        self.attention: tuple[AttentionCall, ...] = ()

    @contextlib.contextmanager
    def forward(self, provided: Provided, *, loops: bool) -> Iterator[None]:
        """Context around a forward in the region."""
        with (
            TorchsNorms(),
            TorchsCalls(),
            AttentionKernels(self._attention, KERNELS, owner=self._module) as kernels,
            autocast(self._autocast),
            self.recomputed(),
            kept_on_host(self._keep_on_host),
        ):
            yield
        self.attention = tuple(kernels.calls)

    @contextlib.contextmanager
    def global_forward(self) -> Iterator[None]:
        """Context around a forward in global space."""
        kernels = AttentionKernels(self._attention, KERNELS, owner=self._module, is_global=True)
        with (
            TorchsNorms(),
            TorchsCalls(),
            kernels,
            autocast(self._autocast),
            kept_on_host(self._keep_on_host),
        ):
            yield
        self.attention = tuple(kernels.calls)

    def finish(self, output: Any) -> Any:
        """The module's output, as tensors that can be computed with."""
        return output

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Context around the backward of a forward in the region."""
        kernels = AttentionKernels(self._attention, KERNELS, owner=self._module)
        with TorchsNorms(), TorchsCalls(), kernels:
            yield

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether a value will be the same at the next step, as far as is known."""
        return is_fixed(tensor)
