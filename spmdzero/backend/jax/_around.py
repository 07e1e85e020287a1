"""What JAX's backend puts around a module: see `spmdzero.backend.replica.Around`."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from spmdzero.backend._region import AttentionCall, AttentionChoice, Recompute
from spmdzero.backend.attention import AttentionKernels
from spmdzero.backend.jax import _host
from spmdzero.backend.jax._attention import KERNELS
from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._factories import OwnFactories
from spmdzero.backend.jax._graph import Graph
from spmdzero.backend.jax._tensor import DEVICE
from spmdzero.backend.jax._values import Space
from spmdzero.backend.replica import RecomputedBlocks


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


class JaxAround:
    """Kernels, autocast, and what runs again in backward.

    Args:
        module: whose forward runs.
        autocast: dtype of `torch.autocast` around the module's forward, None for none.
        attention: who computes `scaled_dot_product_attention`, see `AttentionKernels`.
        recompute: what of which blocks runs again in backward, see `RecomputedBlocks`.

    Attributes:
        quirks, attention: see `Around`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        autocast: torch.dtype | None = None,
        attention: AttentionChoice = "auto",
        recompute: Recompute = "nothing",
    ) -> None:
        self.quirks = JaxQuirks()
        self._module, self._autocast = module, autocast
        self._recomputed = RecomputedBlocks(module, recompute)
        self._attention: AttentionChoice = attention
        self.attention: tuple[AttentionCall, ...] = ()

    @contextlib.contextmanager
    def forward(self, random: Any, upload: Any, enter_whole: Any, *, loops: bool) -> Iterator[None]:
        """Around a forward in the region."""
        kernels = AttentionKernels(self._attention, KERNELS, owner=self._module)
        with _inside(), kernels, _autocast(self._autocast), self._recomputed():
            yield
        self.attention = tuple(kernels.calls)

    @contextlib.contextmanager
    def global_forward(self) -> Iterator[None]:
        """Around a forward in global space."""
        kernels = AttentionKernels(self._attention, KERNELS, owner=self._module, is_global=True)
        with _inside(), kernels, _autocast(self._autocast):
            yield
        self.attention = tuple(kernels.calls)

    def finish(self, output: Any) -> Any:
        """The same."""
        return output

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of a forward in the region."""
        kernels = AttentionKernels(self._attention, KERNELS, owner=self._module)
        with _inside(), kernels:
            yield

    def value_ids(self, tensors: Sequence[torch.Tensor]) -> list[Hashable]:
        """One for each tensor: the same as before where nothing was written into it."""
        return [value_of(tensor).serial for tensor in tensors]

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether a value is computed of nothing but what was uploaded since a trace began."""
        if not _host.traffic.uploads:
            return False
        value = value_of(tensor)
        if value.stand_in:
            return False
        _, leaves = Graph.of([value])
        uploads = _host.traffic.uploads[-1]
        return all(leaf.serial in uploads and leaf.space is Space.NEUTRAL for leaf in leaves)


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    with _without_own_kernels(), OwnFactories():
        yield


@contextlib.contextmanager
def _without_own_kernels() -> Iterator[None]:
    # C++ takes the tensors for the CPU's, for which it has libraries with operations of their own.
    before = torch._C._get_mkldnn_enabled()
    # The setter of torch.backends warns of a device that is of no concern.
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def _autocast(dtype: torch.dtype | None) -> Iterator[None]:
    if dtype is None:
        yield
        return
    # C++ asks for the CPU's, and Python for that of the device it believes a tensor to be on.
    with torch.autocast(DEVICE.type, dtype=dtype), torch.autocast("cpu", dtype=dtype):
        yield
