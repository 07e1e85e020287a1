"""Reductions of tensors over processes (hosts), by DeepSpeed's names and signatures.

In all of them `prof`, `log_name` and `debug` are DeepSpeed's labels for its communication log,
which has no place for host transfers here: they change nothing. With `async_op=True` the handle
to `wait` on is returned; a device tensor goes through the host and its handle has finished.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spmdzero.compat.comm._host import Done, run_on_host
from spmdzero.compat.comm._processes import get_rank, get_world_size
from spmdzero.compat.comm._reduce_op import ReduceOp, as_torch

Group = dist.ProcessGroup | None
Tensors = Sequence[torch.Tensor]


def _reduction(op: Any, group: Group) -> tuple[Any, Callable[[torch.Tensor], None], bool]:
    known, mean = as_torch(op)
    count = get_world_size(group)

    def finish(result: torch.Tensor) -> None:
        if mean:
            result.div_(count)

    return known, finish, mean


def all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> Any:
    """Combines every process's `tensor`, in place."""
    known, finish, mean = _reduction(op, group)

    def call(_: Any, targets: list[torch.Tensor], asynchronous: bool) -> Any:
        work = dist.all_reduce(targets[0], known, group, asynchronous and not mean)
        finish(targets[0])
        return work or Done()

    return run_on_host(call, written=[tensor], async_op=async_op)


def all_reduce_coalesced(
    tensors: Tensors,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> Any:
    """Combines each of several tensors over the processes, in place."""
    for tensor in tensors:
        all_reduce(tensor, op, group)
    return Done() if async_op else None


def inference_all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> Any:
    """As `all_reduce`."""
    return all_reduce(tensor, op, group, async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: str | None = None,
) -> Any:
    """Combines every process's `tensor` on process `dst`, in place."""
    known, finish, mean = _reduction(op, group)

    def call(_: Any, targets: list[torch.Tensor], asynchronous: bool) -> Any:
        work = dist.reduce(targets[0], dst, known, group, asynchronous and not mean)
        if get_rank() == dst:
            finish(targets[0])
        return work or Done()

    return run_on_host(call, written=[tensor], async_op=async_op)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Tensors,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: str | None = None,
) -> Any:
    """`output` becomes the combination of every process's `input_list[own rank]`."""
    return reduce_scatter_tensor(
        output, torch.cat([t.reshape(-1) for t in input_list]), op, group, async_op
    )


def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: str | None = None,
) -> Any:
    """`output_tensor` becomes this process's part of the combination, `[n * rows]` to `[rows]`."""
    known, finish, _ = _reduction(op, group)

    def call(sources: list[torch.Tensor], targets: list[torch.Tensor], _: bool) -> Any:
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
    """As `reduce_scatter_tensor`."""
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)
