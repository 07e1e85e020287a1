"""The functions of `torch.distributed.nn` in a forward, whose backward is of all replicas."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from spmdzero.backend.replica._collectives import RowCollectives

_OPERATIONS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")


def operation_of(opts: Any) -> str:
    """The name of a reduction, of the options that have it, or of a sum for None."""
    asked = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    return next((n for n in _OPERATIONS if asked == getattr(dist.ReduceOp, n)), str(asked))


def write_below_autograd(target: torch.Tensor, value: torch.Tensor) -> None:
    """Writes as torch's collectives do, which autograd neither records nor counts."""
    kept = torch.autograd._unsafe_preserve_version_counter(target)
    with torch.no_grad(), kept:
        target.copy_(value.detach().reshape(target.shape))


class _Gathered(torch.autograd.Function):
    """Every replica's tensor; the gradient of each is the sum of what all replicas have for it."""

    @staticmethod
    def forward(ctx: Any, rows: RowCollectives, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See the class."""
        ctx.rows = rows
        return tuple(part.clone() for part in rows.stacked(tensor).unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """See the class."""
        return None, _Scattered.apply(ctx.rows, "SUM", torch.stack(grads))


class _Scattered(torch.autograd.Function):
    """This replica's part of the combination of `[n, *shape]`; all have its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: RowCollectives, op: str, stacked: torch.Tensor) -> torch.Tensor:
        """See the class."""
        ctx.rows = rows
        return rows.scattered(stacked, op)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyrefly: ignore[bad-override]
        """See the class."""
        parts: Any = _Gathered.apply(ctx.rows, grad)
        return None, None, torch.stack(parts)


class _Reduced(torch.autograd.Function):
    """The combination of all replicas' tensors, and of their gradients, as in torch."""

    @staticmethod
    def forward(ctx: Any, rows: RowCollectives, op: str, tensor: torch.Tensor) -> torch.Tensor:
        """See the class."""
        ctx.rows, ctx.op = rows, op
        return rows.reduced(tensor, op)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyrefly: ignore[bad-override]
        """See the class."""
        return None, None, _Reduced.apply(ctx.rows, ctx.op, grad)


class _Sent(torch.autograd.Function):
    """One replica's tensor on all of them, which alone has the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: RowCollectives, source: int, tensor: torch.Tensor) -> torch.Tensor:
        """See the class."""
        ctx.rows, ctx.source = rows, source
        return rows.stacked(tensor)[source].clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyrefly: ignore[bad-override]
        """See the class."""
        total: Any = _Reduced.apply(ctx.rows, "SUM", grad)
        zero = torch.zeros_like(total)
        places = [total if place == ctx.source else zero for place in range(ctx.rows.size)]
        return None, None, ctx.rows.own(torch.stack(places))


def _gather(rows: RowCollectives, tensor: torch.Tensor) -> Any:
    return _Gathered.apply(rows, tensor)


def _gather_base(rows: RowCollectives, output: torch.Tensor, tensor: torch.Tensor) -> Any:
    parts: Any = _Gathered.apply(rows, tensor)
    whole = torch.stack(parts).reshape(output.shape)
    write_below_autograd(output, whole)
    return whole


def _reduce(rows: RowCollectives, op: Any, tensor: torch.Tensor) -> Any:
    return _Reduced.apply(rows, operation_of(op), tensor)


def _reduce_scatter(
    rows: RowCollectives, op: Any, output: torch.Tensor, *parts: torch.Tensor
) -> Any:
    rows.require_size(len(parts), "a list with {} places")
    own: Any = _Scattered.apply(rows, operation_of(op), torch.stack(parts))
    write_below_autograd(output, own)
    return own


def _broadcast(rows: RowCollectives, source: int, tensor: torch.Tensor) -> Any:
    return _Sent.apply(rows, rows.source(source), tensor)


def summed(rows: RowCollectives, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all replicas' tensors, and of their gradients."""
    return _reduce(rows, None, tensor)


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(rows: RowCollectives, *_: Any) -> NoReturn:
        raise rows.lonely(f"torch.distributed.nn's {name}")

    return refuse


# Names of torch 2.9: what each public function applies. Those of another release that are missing
# here run torch's own, which ask for the rank in backward, and are refused there.
DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "_AllGather": _gather,
    "_AllGatherBase": _gather_base,
    "_AllReduce": _reduce,
    "_Reduce_Scatter": _reduce_scatter,
    "_Broadcast": _broadcast,
    "_Gather": _refused("gather"),
    "_Scatter": _refused("scatter"),
    "_Reduce": _refused("reduce"),
    "_AlltoAll": _refused("all_to_all"),
    "_AlltoAllSingle": _refused("all_to_all_single"),
}
