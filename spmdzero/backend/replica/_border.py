"""Carries tensors over the border of the replica region, and gradients back.

In all functions, `seed` is the factor of gradients inside the region over those of the global
loss. With 1 they are the global loss's; with the number of devices they are those of the replica's
own loss, as on a DeepSpeed rank, which matters for the overflow of fp16.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from spmdzero.backend._current import arrays, runtime
from spmdzero.backend.forms._autograd_graph import hands_over, nodes_behind
from spmdzero.backend.forms._crossing import Crossing, Way
from spmdzero.backend.forms._own_rows import local_replicas
from spmdzero.backend.forms._with_graph import refuse_graph
from spmdzero.backend.protocols._mesh import Mesh
from spmdzero.backend.protocols._region import GradientSink, PartsOfGradients
from spmdzero.backend.replica import _manual
from spmdzero.errors import ReplicaRegionError


class _Entering(Crossing):
    @classmethod
    def opposite(cls) -> type[Crossing]:
        """See `Crossing`."""
        return _Leaving


class _Leaving(Crossing):
    leaves_region = True

    @classmethod
    def opposite(cls) -> type[Crossing]:
        """See `Crossing`."""
        return _Entering


class _EnteringParameter(_Entering):
    """Enters a parameter, whose gradient goes to `sink` or to the caller of the pass."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, tensor: torch.Tensor, there: Way, back: Way, sink: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """See the class."""
        ctx.sink = sink
        # A loop has the gradients of what it gathers go by other ways.
        ctx.set_materialize_grads(False)
        return _Entering.forward(ctx, tensor, there, back)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, None, None]:
        """See the class."""
        if any(grad is None for grad in grads):
            return None, None, None, None
        if hands_over():
            return *_Entering.backward(ctx, *grads), None
        if torch.is_grad_enabled():
            refuse_graph()
        ctx.sink(*grads)
        return None, None, None, None


def enter_batch(
    tensor: torch.Tensor, dim: int, mesh: Mesh, seed: int, *, joined: int = 1
) -> torch.Tensor:
    """`[b, ...]` to this replica's `[b/n, ...]`: its own rows of each of the `joined` batches."""
    if joined > 1:
        tensor = _regrouped(tensor, dim, joined, local_replicas(mesh.spec))
    shape, spec = tuple(tensor.shape), mesh.batch_spec(tensor.dim(), dim)
    return _enter(
        tensor,
        lambda whole: mesh.enter(whole, spec),
        lambda grad: _times(mesh.leave(grad, spec, shape), 1 / seed),
    )


def leave_batch(
    tensor: torch.Tensor, dim: int, mesh: Mesh, seed: int, *, joined: int = 1
) -> torch.Tensor:
    """This replica's `[b/n, ...]` to `[b, ...]`: the `joined` batches one after the other."""
    shape, spec = list(tensor.shape), mesh.batch_spec(tensor.dim(), dim)
    shape[dim] *= mesh.replicas
    whole = _leave(
        tensor,
        lambda own: mesh.leave(own, spec, tuple(shape)),
        lambda grad: _times(mesh.enter(grad, spec), seed),
    )
    if joined == 1:
        return whole
    return _regrouped(whole, dim, local_replicas(mesh.spec), joined)


def _regrouped(tensor: torch.Tensor, dim: int, outer: int, inner: int) -> torch.Tensor:
    """The rows `[outer, inner, ...]` of each host as `[inner, outer, ...]`."""
    apart = tensor.unflatten(dim, (runtime.process_count(), outer, inner, -1))
    return apart.transpose(dim + 1, dim + 2).flatten(dim, dim + 3)


def enter_whole(tensor: torch.Tensor, mesh: Mesh, seed: int) -> torch.Tensor:
    """Every replica's copy; the gradient of `tensor` is the sum of the copies' gradients."""
    return _enter(tensor, *_whole(mesh, seed))


def enter_parameter(
    parameter: torch.Tensor,
    name: str,
    mesh: Mesh,
    seed: int,
    sink: GradientSink,
    *,
    there: Way,
) -> torch.Tensor:
    """A parameter on this replica, which `there` takes in; its gradient goes to `sink`.

    `torch.autograd.grad` gets the gradient that `enter_whole` has.

    Raises SpmdZeroUsageError in a `backward(create_graph=True)`.
    """
    entered = _EnteringParameter.apply(
        parameter, there, _whole(mesh, seed)[1], functools.partial(sink, name)
    )
    return cast(torch.Tensor, entered)


def enter_part(
    parameter: torch.Tensor,
    name: str,
    sink: GradientSink,
    *,
    there: Way,
    parts: PartsOfGradients,
    seed: int,
) -> torch.Tensor:
    """Stands for a parameter where a loop takes it as shards: its gradient is a part.

    Where `torch.autograd.grad` is asked for it, it is that of `enter_whole`.

    Args:
        there: returns a tensor of the form of a part, of whose value no use is made.
        parts: whose `part` the gradient is.
    """

    def back(part: torch.Tensor) -> torch.Tensor:
        return _times(parts.of_part(name, part), 1 / (parts.unit * seed))

    entered = _EnteringParameter.apply(
        parameter, there, back, lambda part: sink(name, parts.of_part(name, part), waits=True)
    )
    return cast(torch.Tensor, entered)


def _whole(mesh: Mesh, seed: int) -> tuple[Way, Way]:
    def back(grad: torch.Tensor) -> torch.Tensor:
        return _times(mesh.whole(_manual.leave_stacked(grad, mesh).sum(0)), 1 / seed)

    return lambda whole: _manual.enter_copy(whole, mesh), back


def leave_mean(tensor: torch.Tensor, mesh: Mesh, seed: int) -> torch.Tensor:
    """The mean over replicas of a tensor that each replica has, `[...]` to `[...]`."""
    # DeepSpeed divides each rank's gradient by the world size. With a seed of 1 that happens
    # once, at the loss, so that the parameters' partial gradients only have to be summed.
    return _leave(
        tensor,
        lambda own: mesh.whole(_manual.leave_stacked(own, mesh).mean(0)),
        lambda grad: _times(_manual.enter_copy(grad, mesh), seed / mesh.replicas),
    )


def _enter(tensor: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
    return cast(torch.Tensor, _Entering.apply(tensor, there, back))


def _leave(tensor: torch.Tensor, there: Way, back: Way) -> torch.Tensor:
    return cast(torch.Tensor, _Leaving.apply(tensor, there, back))


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else tensor * factor


def refuse_leak(loss: torch.Tensor) -> None:
    """Raises ReplicaRegionError if a loss is computed from a tensor that never left its region.

    A forward hook can keep such a tensor. XLA would end the process when it compiles the two
    together. So the loss, which would be compiled with the next program, is set to NaN.
    """
    for node in nodes_behind(loss, ends=lambda node: _leaves(node)):
        if _function_of(node) in (_Entering, _EnteringParameter):
            arrays.replace(loss, torch.full_like(loss.detach(), float("nan")))
            raise ReplicaRegionError(
                "this loss is computed with a tensor that was kept from inside the model's "
                "forward, by a hook for example: each device has another one there, and none of "
                "them is the value for all. Return it from forward, which takes its mean"
            )


def _leaves(node: Any) -> bool:
    # A folded forward is a node that says so too.
    return getattr(_function_of(node), "leaves_region", False)


def _function_of(node: Any) -> Any:
    return getattr(node, "_forward_cls", None)
