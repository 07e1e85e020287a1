"""Reductions of tensors over processes (hosts), with DeepSpeed's names and signatures."""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spmdzero.backend import current
from spmdzero.backend.hosts._row_sharers import RowSharers
from spmdzero.compat.comm._log import labelled
from spmdzero.compat.comm._processes import get_rank, get_world_size
from spmdzero.compat.comm._through_host import Done, run_on_host

Group = dist.ProcessGroup | None
Tensors = Sequence[torch.Tensor]
# Newer torch deprecates the name `reduce_scatter_tensor`, which DeepSpeed still has.
_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class ReduceOp(enum.Enum):
    """DeepSpeed's reductions; functions accept torch's own `ReduceOp` too."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


def _reduction(op: Any, group: Group) -> tuple[Any, Callable[[torch.Tensor], None], bool]:
    """The operation for gloo, a function that finishes its result, and whether it is needed.

    gloo has no mean, so the sum is divided afterwards. In a forward devices have one.
    """
    name = op.name if isinstance(op, ReduceOp) else str(op).rsplit(".", 1)[-1]
    # The devices that share rows have a mean of their own.
    gloo = not isinstance(group, RowSharers) and not current().in_region()
    mean = name == "AVG" and gloo
    known = dist.ReduceOp.SUM if mean else getattr(dist.ReduceOp, name)
    count = get_world_size(group)

    def finish(result: torch.Tensor) -> None:
        if mean:
            result.div_(count)

    return known, finish, mean


@labelled()
def all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Combines every process's `tensor`, in place."""
    known, finish, mean = _reduction(op, group)

    def call(_: Any, targets: list[torch.Tensor], asynchronous: bool) -> Any:
        work = dist.all_reduce(targets[0], known, group, asynchronous and not mean)
        finish(targets[0])
        return work or Done()

    return run_on_host(call, written=[tensor], async_op=async_op)


@labelled(log_name="all_reduce")
def all_reduce_coalesced(
    tensors: Tensors, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Combines each of several tensors over the processes, in place."""
    for tensor in tensors:
        all_reduce(tensor, op, group)
    return Done() if async_op else None


@labelled(log_name="all_reduce")
def inference_all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    """Does what `all_reduce` does."""
    return all_reduce(tensor, op, group, async_op)


@labelled()
def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Combines every process's `tensor` on process `dst`, in place."""
    known, finish, mean = _reduction(op, group)

    def call(_: Any, targets: list[torch.Tensor], asynchronous: bool) -> Any:
        work = dist.reduce(targets[0], dst, known, group, asynchronous and not mean)
        if get_rank() == dst:
            finish(targets[0])
        return work or Done()

    return run_on_host(call, written=[tensor], async_op=async_op)


@labelled()
def reduce_scatter(
    output: torch.Tensor,
    input_list: Tensors,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sets `output` to the combination of all processes' `input_list[own rank]`."""
    return reduce_scatter_tensor(
        output, torch.cat([t.reshape(-1) for t in input_list]), op, group, async_op
    )


@labelled()
def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sets `output_tensor` `[rows]` to this process's part of the combination `[n * rows]`."""
    known, finish, _ = _reduction(op, group)

    def call(sources: list[torch.Tensor], targets: list[torch.Tensor], _: bool) -> Any:
        if current().in_region():
            _scatter_single(targets[0], sources[0], known, group)
            return Done()
        # gloo has no reduce-scatter of its own.
        whole = sources[0].detach().clone().reshape(-1)
        dist.all_reduce(whole, known, group)
        finish(whole)
        targets[0].copy_(
            whole.chunk(get_world_size(group))[get_rank(group)].reshape(targets[0].shape)
        )
        return Done()

    return run_on_host(call, read=[tensor], written=[output_tensor], async_op=async_op)


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    debug: str | None = None,
) -> Any:
    """Does what `reduce_scatter_tensor` does."""
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)
