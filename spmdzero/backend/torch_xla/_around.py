"""The contexts of torch_xla's backend around a module: see `spmdzero.backend.replica.Around`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from spmdzero._logging import log_once
from spmdzero.backend.attention import masks_without_reading
from spmdzero.backend.protocols._region import AttentionCall, Recompute
from spmdzero.backend.replica import RecomputedBlocks, kept_on_host
from spmdzero.backend.replica._around import Provided
from spmdzero.backend.torch_xla import runtime
from spmdzero.backend.torch_xla._autocast import autocast
from spmdzero.backend.torch_xla._quirks import TorchXlaQuirks
from spmdzero.backend.torch_xla.kernels import TorchsCalls, TorchsNorms


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
