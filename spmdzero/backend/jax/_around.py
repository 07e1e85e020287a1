"""The contexts of JAX's backend around a module: see `spmdzero.backend.replica.Around`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from spmdzero.backend.attention import AttentionKernels
from spmdzero.backend.forms._row_parts import rows_in_parts
from spmdzero.backend.jax.axes._shared_rows import SharedRows
from spmdzero.backend.jax.graph._graph import Graph
from spmdzero.backend.jax.kernels._attention import KERNELS
from spmdzero.backend.jax.lazy import _host
from spmdzero.backend.jax.lazy._dispatch import value_of
from spmdzero.backend.jax.lazy._factories import OwnFactories
from spmdzero.backend.jax.lazy._libraries import without_own_kernels
from spmdzero.backend.jax.lazy._pending_block import made_real
from spmdzero.backend.jax.lazy._quirks import JaxQuirks
from spmdzero.backend.jax.lazy._tensor import DEVICE, LazyTensor
from spmdzero.backend.jax.scan import Scan, equal_blocks_as_loops
from spmdzero.backend.protocols._region import (
    AttentionCall,
    AttentionChoice,
    LowPrecision,
    Recompute,
)
from spmdzero.backend.replica import RecomputedBlocks, ScaledProducts, kept_on_host
from spmdzero.backend.replica._around import Provided


class JaxAround:
    """Kernels, loops, autocast and recomputation around a module.

    Args:
        module: the module whose forward runs.
        autocast: dtype of `torch.autocast` around the module's forward, None for none.
        attention: what computes `scaled_dot_product_attention`, see `AttentionKernels`.
        scan: whether equal blocks of the module become a loop, see `equal_blocks_as_loops`.
        recompute: which blocks run again in backward, and their policy, see `RecomputedBlocks`.
        keep_on_host: whether what runs again keeps its inputs in the host's memory until backward.
        products: the linear layers' products in 8 bits, None for none.
        mark: annotates a buffer that a global forward wrote as replicated; None where buffers enter
            and leave a region.
        rows: moves rows that devices share around attention; None where none are.

    Attributes:
        quirks, attention, recomputed, keeps_tensors: see `Around`.
    """

    keeps_tensors = True

    def __init__(
        self,
        module: nn.Module,
        *,
        autocast: torch.dtype | None = None,
        attention: AttentionChoice = "auto",
        scan: Scan = "off",
        recompute: Recompute = "nothing",
        keep_on_host: bool = False,
        products: LowPrecision | None = None,
        mark: Callable[[torch.Tensor], object] | None = None,
        rows: SharedRows | None = None,
    ) -> None:
        self.quirks = JaxQuirks()
        self._module, self._autocast, self._scan = module, autocast, scan
        self.recomputed, self._mark = RecomputedBlocks(module, recompute), mark
        self._keep_on_host, self._rows = keep_on_host, rows
        self._products = ScaledProducts(module, products)
        self._attention: AttentionChoice = attention
        self.attention: tuple[AttentionCall, ...] = ()

    @contextlib.contextmanager
    def forward(self, provided: Provided, *, loops: bool) -> Iterator[None]:
        """Context around a forward in the region."""
        with (
            _inside(),
            self._in_parts(),
            self._kernels() as kernels,
            _autocast(self._autocast),
            self._products(),
            # Inside the loops, because recomputation concerns a part of a loop's body.
            self.recomputed(),
            kept_on_host(self._keep_on_host),
            equal_blocks_as_loops(self._module, self._scan if loops else "off", provided),
        ):
            yield
        self.attention = tuple(kernels.calls)

    @contextlib.contextmanager
    def global_forward(self) -> Iterator[None]:
        """Context around a forward in global space."""
        kernels = AttentionKernels(self._attention, KERNELS, owner=self._module, is_global=True)
        with (
            _inside(),
            kernels,
            _autocast(self._autocast),
            kept_on_host(self._keep_on_host),
        ):
            yield
        self.attention = tuple(kernels.calls)
        if self._mark is None:
            return
        for buffer in self._module.buffers():
            if isinstance(buffer, LazyTensor) and value_of(buffer).pending:
                # With the annotation of its former value it can take that value's memory.
                self._mark(buffer)

    def finish(self, output: Any) -> Any:
        """The module's output, as tensors that can be computed with."""
        return made_real(output)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Context around the backward of a forward in the region."""
        with _inside(), self._in_parts(), self._kernels(), self._products():
            yield

    def _in_parts(self) -> contextlib.AbstractContextManager[None]:
        return rows_in_parts(1 if self._rows is None else self._rows.parts)

    def _kernels(self) -> AttentionKernels:
        return AttentionKernels(self._attention, KERNELS, owner=self._module, rows=self._rows)

    def is_fixed(self, tensor: torch.Tensor) -> bool:
        """Whether a value comes only from tensors that were uploaded since a trace began."""
        if not _host.traffic.uploads:
            return False
        value = value_of(tensor)
        if value.stand_in:
            return False
        _, leaves = Graph.of([value])
        uploads = _host.traffic.uploads[-1]
        return all(leaf.serial in uploads and leaf.common for leaf in leaves)

    def is_same_everywhere(self, tensor: torch.Tensor) -> bool:
        """Whether a value comes only from what every replica has whole, of any origin."""
        value = value_of(tensor)
        if value.node is None:
            return value.common
        graph, leaves = Graph.of([value])
        return graph.common(leaves) == [True]


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    with without_own_kernels(), OwnFactories():
        yield


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if dtype is None else torch.autocast(DEVICE.type, dtype=dtype)
