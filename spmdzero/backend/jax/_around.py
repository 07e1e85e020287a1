"""What JAX's backend puts around a module: see `spmdzero.backend.replica.Around`."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from spmdzero.backend._region import AttentionCall, Recompute
from spmdzero.backend.jax import _host
from spmdzero.backend.jax._dispatch import value_of
from spmdzero.backend.jax._factories import OwnFactories
from spmdzero.backend.jax._graph import Graph
from spmdzero.backend.jax._tensor import LazyTensor
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
    """Autocast, and what runs again in backward.

    Args:
        module: whose forward runs.
        autocast: dtype of `torch.autocast` around the module's forward, None for none.
        recompute: what of which blocks runs again in backward, see `RecomputedBlocks`.
        mark: says of a buffer that a global forward wrote that every device has it whole; None
            where buffers enter and leave a region.

    Attributes:
        quirks, attention: see `Around`; there are no kernels.
    """

    attention: tuple[AttentionCall, ...] = ()

    def __init__(
        self,
        module: nn.Module,
        *,
        autocast: torch.dtype | None,
        recompute: Recompute = "nothing",
        mark: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self.quirks = JaxQuirks()
        self._module, self._mark = module, mark
        self._autocast, self._recomputed = autocast, RecomputedBlocks(module, recompute)

    @contextlib.contextmanager
    def forward(self, random: Any, upload: Any, enter_whole: Any, *, loops: bool) -> Iterator[None]:
        """Around a forward in the region."""
        with self.global_forward(), self._recomputed():
            yield

    @contextlib.contextmanager
    def global_forward(self) -> Iterator[None]:
        """Around a forward in global space."""
        with _without_own_kernels(), _autocast(self._autocast), OwnFactories():
            yield
        if self._mark is None:
            return
        for buffer in self._module.buffers():
            if isinstance(buffer, LazyTensor) and value_of(buffer).pending:
                # What is as it was before takes its memory.
                self._mark(buffer)

    def finish(self, output: Any) -> Any:
        """The same."""
        return output

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of a forward in the region."""
        with _without_own_kernels(), OwnFactories():
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


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
