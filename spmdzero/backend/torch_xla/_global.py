"""The forward in global space: every operation sees the whole batch, GSPMD splits it."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spmdzero.backend._tree import Batch, map_tensors
from spmdzero.backend.torch_xla._autocast import autocast
from spmdzero.backend.torch_xla._reads import watch_reads
from spmdzero.backend.torch_xla.arrays import fresh
from spmdzero.backend.torch_xla.kernels import TorchsNorms, mend_extremes
from spmdzero.backend.torch_xla.mesh import DeviceMesh

# Propagation gathers the whole batch around these (measured on torch_xla 2.9, CPU).
_LEAKING = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.TransformerEncoderLayer,
)


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
    """

    def __init__(
        self, *, mesh: DeviceMesh, module: nn.Module, autocast: torch.dtype | None = None
    ) -> None:
        mend_extremes()
        watch_reads(mesh)
        self._mesh, self._module, self._autocast = mesh, module, autocast
        self._rows: set[tuple[int, int]] = set()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the module on global tensors, `Batch` or plain; returns what it returns."""
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
            hooks.enter_context(autocast(self._autocast))
            return self._module(*args, **kwargs)

    def _keep_split(self, tree: Any) -> Any:
        return map_tensors(tree, lambda _, tensor: self._annotate(tensor))

    def _annotate(self, tensor: torch.Tensor) -> torch.Tensor:
        for dim, rows in self._rows:
            if tensor.is_floating_point() and tensor.dim() > dim and tensor.shape[dim] == rows:
                return _KeepSplit.apply(tensor, dim, self._mesh)  # type: ignore[return-value]
        return tensor
