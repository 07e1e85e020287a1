"""The autograd functions that carry tensors over the region's border, and gradients back."""

from collections.abc import Callable
from typing import Any

import torch

from spmdzero.xla import _manual
from spmdzero.xla.mesh import DeviceMesh


class EnterBatch(torch.autograd.Function):
    """`[b, ...]` to this replica's `[b/n, ...]`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
        ctx.shape, ctx.mesh, ctx.spec = tensor.shape, mesh, mesh.batch_spec(tensor.dim(), dim)
        return _manual.enter(tensor, mesh, ctx.spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _manual.leave(grad, ctx.mesh, ctx.spec, ctx.shape), None, None


class LeaveBatch(torch.autograd.Function):
    """This replica's `[b/n, ...]` to `[b, ...]`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh, ctx.spec = mesh, mesh.batch_spec(tensor.dim(), dim)
        shape = [size * mesh.size if i == dim else size for i, size in enumerate(tensor.shape)]
        return _manual.leave(tensor, mesh, ctx.spec, tuple(shape))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _manual.enter(grad, ctx.mesh, ctx.spec), None, None


class EnterWhole(torch.autograd.Function):
    """A replicated input: its gradient is the sum of the replicas' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return _manual.enter(tensor, mesh, (None,) * tensor.dim())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.mesh.mark(_manual.leave_stacked(grad, ctx.mesh).sum(0)), None


class EnterParameter(torch.autograd.Function):
    """A parameter's copy on this replica; its gradient goes to the sink, not to autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        parameter: torch.Tensor,
        name: str,
        mesh: DeviceMesh,
        sink: Callable[[str, torch.Tensor], None],
    ) -> torch.Tensor:
        ctx.name, ctx.sink = name, sink
        return _manual.enter(parameter, mesh, (None,) * parameter.dim())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None]:  # type: ignore[override]
        ctx.sink(ctx.name, grad)
        return None, None, None, None


class LeaveMean(torch.autograd.Function):
    """The mean over replicas of a tensor that each of them has, `[...]` to `[...]`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return mesh.mark(_manual.leave_stacked(tensor, mesh).mean(0))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        # DeepSpeed divides each rank's gradient by the world size; here it happens once, at the
        # loss, so that the parameters' Partials have only to be summed.
        return _manual.enter(grad, ctx.mesh, (None,) * grad.dim()) / ctx.mesh.size, None
