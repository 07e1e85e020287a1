"""The forward in global space: every operation sees the whole batch, GSPMD splits it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from spmdzero._user_line import user_line
from spmdzero.backend._region import (
    AttentionCall,
    AttentionChoice,
    KeySource,
    Passage,
    Tracing,
)
from spmdzero.backend._region import Reader as ReadsBy
from spmdzero.backend._tree import Batch, map_tensors
from spmdzero.backend.torch_xla import _private
from spmdzero.backend.torch_xla._autocast import autocast
from spmdzero.backend.torch_xla._reads import Reader, reads_by, watch_reads
from spmdzero.backend.torch_xla.arrays import fresh
from spmdzero.backend.torch_xla.attention import AttentionKernels
from spmdzero.backend.torch_xla.kernels import TorchsNorms, mend_extremes
from spmdzero.backend.torch_xla.mesh import DeviceMesh

# Propagation gathers the whole batch around these (measured on torch_xla 2.9, CPU).
_LEAKING = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.TransformerEncoderLayer,
)
_NO_REGION = "the forward is global, and GSPMD can't split a kernel"


class _KeepSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh, ctx.spec = mesh, mesh.batch_spec(tensor.dim(), dim)
        return mesh.mark(fresh(tensor), ctx.spec)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        return ctx.mesh.mark(fresh(grad), ctx.spec), None, None


class GlobalForward:
    """Calls `module` on the whole batch, and annotates what flows in and out of leaking modules.

    Args:
        mesh: the devices; every axis carries the batch.
        module: its parameters live on the device, replicated.
        autocast: dtype of `torch.autocast` around the module's forward, None for none.
        attention: as `ReplicaRegion`'s. Nothing becomes a kernel, which GSPMD couldn't split.

    Attributes:
        attention: as `ReplicaRegion`'s.
        read_at: as `ReplicaRegion`'s; None, because a refused read is not noted.
    """

    read_at: str | None = None

    def __init__(
        self,
        *,
        mesh: DeviceMesh,
        module: nn.Module,
        autocast: torch.dtype | None = None,
        attention: AttentionChoice = "auto",
    ) -> None:
        mend_extremes()
        watch_reads(mesh)
        self._mesh, self._module, self._autocast = mesh, module, autocast
        self._rows: set[tuple[int, int]] = set()
        self._attention: AttentionChoice = attention
        self.attention: tuple[AttentionCall, ...] = ()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the module on global tensors, `Batch` or plain; returns what it returns."""
        return self._call(self._module, args, kwargs)

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Tracing) -> Passage:
        """As a call, but nothing of the module is read or written.

        Gradients reach the sink in global space. Random draws take no key: they are those of the
        devices' own generator.
        """
        state = {**own.parameters, **own.buffers}
        before = _private.output_ids(list(own.buffers.values()))
        for name, parameter in own.parameters.items():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad, name=name: own.sink(name, grad))

        def module(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self._module, state, args, kwargs)

        with reads_by(Reader(values=own.read, line=user_line)):
            output = self._call(module, args, kwargs)
        after = _private.output_ids([state[name] for name in own.buffers])
        written = [n for n, old, new in zip(own.buffers, before, after, strict=True) if old != new]
        buffers = {name: state[name].detach() for name in written}
        return Passage(output=output, buffers=buffers, flags={}, state={})

    @contextlib.contextmanager
    def backward(
        self, state: Mapping[str, torch.Tensor], *, key: KeySource, read: ReadsBy
    ) -> Iterator[None]:
        """Wraps the backward of what `trace` returned."""
        with reads_by(Reader(values=read, line=user_line)):
            yield

    def _call(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._rows = set()

        def unwrap(_: str, tensor: Any) -> torch.Tensor:
            if not isinstance(tensor, Batch):
                return tensor
            self._rows.add((tensor.dim, tensor.tensor.shape[tensor.dim]))
            return tensor.tensor

        args, kwargs = map_tensors((args, dict(kwargs)), unwrap)
        with contextlib.ExitStack() as hooks:
            for part in self._module.modules():
                if isinstance(part, _LEAKING):
                    before = part.register_forward_pre_hook(lambda _, args: self._keep_split(args))
                    after = part.register_forward_hook(lambda _, args, out: self._keep_split(out))
                    hooks.callback(before.remove)
                    hooks.callback(after.remove)
            hooks.enter_context(TorchsNorms())
            kernels = AttentionKernels(self._attention, owner=self._module, never=_NO_REGION)
            hooks.enter_context(kernels)
            hooks.enter_context(autocast(self._autocast))
            output = module(*args, **kwargs)
        self.attention = tuple(kernels.calls)
        return output

    def _keep_split(self, tree: Any) -> Any:
        return map_tensors(tree, lambda _, tensor: self._annotate(tensor))

    def _annotate(self, tensor: torch.Tensor) -> torch.Tensor:
        for dim, rows in self._rows:
            if tensor.is_floating_point() and tensor.dim() > dim and tensor.shape[dim] == rows:
                return _KeepSplit.apply(tensor, dim, self._mesh)  # type: ignore[return-value]
        return tensor
