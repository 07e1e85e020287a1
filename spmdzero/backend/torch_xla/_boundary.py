"""The autograd functions that carry tensors over the region's border, and gradients back."""

from collections.abc import Callable
from typing import Any, cast

import torch

from spmdzero.backend._autograd_graph import nodes_behind
from spmdzero.backend.torch_xla import _manual, _private
from spmdzero.backend.torch_xla.mesh import DeviceMesh
from spmdzero.errors import ReplicaRegionError

# `seed` in all of these: gradients inside the region are that many times those of the global loss.
# With 1 they are the global loss's; with the number of devices they are those of the replica's own
# loss, as on a DeepSpeed rank, which decides when fp16 overflows.


class _EnterBatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: int, mesh: DeviceMesh, seed: int
    ) -> torch.Tensor:
        ctx.shape, ctx.mesh, ctx.spec = tensor.shape, mesh, mesh.batch_spec(tensor.dim(), dim)
        ctx.seed = seed
        return _manual.enter(tensor, mesh, ctx.spec)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = grads
        whole = _manual.leave(grad, ctx.mesh, ctx.spec, ctx.shape)
        return _times(whole, 1 / ctx.seed), None, None, None


class _LeaveBatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: int, mesh: DeviceMesh, seed: int
    ) -> torch.Tensor:
        ctx.mesh, ctx.spec, ctx.seed = mesh, mesh.batch_spec(tensor.dim(), dim), seed
        shape = [size * mesh.size if i == dim else size for i, size in enumerate(tensor.shape)]
        return _manual.leave(tensor, mesh, ctx.spec, tuple(shape))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = grads
        return _times(_manual.enter(grad, ctx.mesh, ctx.spec), ctx.seed), None, None, None


class _EnterWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh, seed: int) -> torch.Tensor:
        ctx.mesh, ctx.seed = mesh, seed
        return _manual.enter(tensor, mesh, (None,) * tensor.dim())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        total = ctx.mesh.mark(_manual.leave_stacked(grad, ctx.mesh).sum(0))
        return _times(total, 1 / ctx.seed), None, None


class _EnterParameter(torch.autograd.Function):
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
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, None]:
        (grad,) = grads
        ctx.sink(ctx.name, grad)
        return None, None, None, None


class _LeaveMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh, seed: int) -> torch.Tensor:
        ctx.mesh, ctx.seed = mesh, seed
        return mesh.mark(_manual.leave_stacked(tensor, mesh).mean(0))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        # DeepSpeed divides each rank's gradient by the world size. With a seed of 1 that happens
        # once, at the loss, so that the parameters' Partials have only to be summed.
        own = _manual.enter(grad, ctx.mesh, (None,) * grad.dim())
        return _times(own, ctx.seed / ctx.mesh.size), None, None


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else tensor * factor


def enter_batch(tensor: torch.Tensor, dim: int, mesh: DeviceMesh, seed: int) -> torch.Tensor:
    """`[b, ...]` to this replica's `[b/n, ...]`."""
    return cast(torch.Tensor, _EnterBatch.apply(tensor, dim, mesh, seed))


def leave_batch(tensor: torch.Tensor, dim: int, mesh: DeviceMesh, seed: int) -> torch.Tensor:
    """This replica's `[b/n, ...]` to `[b, ...]`."""
    return cast(torch.Tensor, _LeaveBatch.apply(tensor, dim, mesh, seed))


def enter_whole(tensor: torch.Tensor, mesh: DeviceMesh, seed: int) -> torch.Tensor:
    """Every replica's copy; the gradient of `tensor` is the sum of the copies' gradients."""
    return cast(torch.Tensor, _EnterWhole.apply(tensor, mesh, seed))


def enter_parameter(
    parameter: torch.Tensor,
    name: str,
    mesh: DeviceMesh,
    sink: Callable[[str, torch.Tensor], None],
) -> torch.Tensor:
    """A parameter's copy on this replica; its gradient goes to `sink`, not to autograd."""
    return cast(torch.Tensor, _EnterParameter.apply(parameter, name, mesh, sink))


def leave_mean(tensor: torch.Tensor, mesh: DeviceMesh, seed: int) -> torch.Tensor:
    """The mean over replicas of a tensor that each of them has, `[...]` to `[...]`."""
    return cast(torch.Tensor, _LeaveMean.apply(tensor, mesh, seed))


_ENTERED = (_EnterBatch, _EnterWhole, _EnterParameter)
_LEFT = (_LeaveBatch, _LeaveMean)


def refuse_leak(loss: torch.Tensor) -> None:
    """Raises ReplicaRegionError where a loss is computed with a tensor that didn't leave a region.

    A forward hook can keep one. XLA would end the process when it compiles the two together; so
    the loss, which would be compiled with whatever comes next, is NaN afterwards.
    """
    for node in nodes_behind(loss, ends=lambda node: _function_of(node) in _LEFT):
        if _function_of(node) in _ENTERED:
            _private.replace(loss, torch.full_like(loss.detach(), float("nan")))
            raise ReplicaRegionError(
                "this loss is computed with a tensor that was kept from inside the model's "
                "forward, by a hook for example: each device has another one there, and none of "
                "them is the value for all. Return it from forward, which takes its mean"
            )


def _function_of(node: Any) -> Any:
    return getattr(node, "_forward_cls", None)
