"""Transfers of tensors between processes (hosts), with DeepSpeed's names and signatures."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from spmdzero.compat.comm._log import labelled
from spmdzero.compat.comm._through_host import Done, run_on_host

Group = dist.ProcessGroup | None
Tensors = Sequence[torch.Tensor]
# Newer torch deprecates the name `all_gather_into_tensor`, which DeepSpeed still has.
_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@labelled()
def broadcast(tensor: torch.Tensor, src: int, group: Group = None, async_op: bool = False) -> Any:
    """Copies the `tensor` of process `src` to every process, in place."""
    return run_on_host(
        lambda _, targets, asynchronous: dist.broadcast(targets[0], src, group, asynchronous),
        written=[tensor],
        async_op=async_op,
    )


@labelled()
def all_gather(
    tensor_list: Tensors, tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Sets `tensor_list[i]` to process i's `tensor`."""
    return run_on_host(
        lambda sources, targets, asynchronous: dist.all_gather(
            targets, sources[0], group, asynchronous
        ),
        read=[tensor],
        written=tensor_list,
        async_op=async_op,
    )


def all_gather_coalesced(
    output_tensors: Tensors, input_tensors: Tensors, group: Group = None, async_op: bool = False
) -> Any:
    """Sets each `output_tensors[i]` to all processes' `input_tensors[i]`, in order of rank."""
    for output, tensor in zip(output_tensors, input_tensors, strict=True):
        all_gather_into_tensor(output, tensor, group)
    return Done() if async_op else None


@labelled()
def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Any:
    """Sets `output_tensor` `[n * rows, ...]` to all processes' `tensor`, in order of rank."""
    return run_on_host(
        lambda sources, targets, asynchronous: _gather_single(
            targets[0], sources[0], group, asynchronous
        ),
        read=[tensor],
        written=[output_tensor],
        async_op=async_op,
    )


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    debug: str | None = None,
) -> Any:
    """Does what `all_gather_into_tensor` does."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


@labelled()
def gather(
    tensor: torch.Tensor,
    gather_list: Tensors | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sets `gather_list[i]` to process i's `tensor`, on process `dst`."""
    return run_on_host(
        lambda sources, targets, asynchronous: dist.gather(
            sources[0], targets or None, dst, group, asynchronous
        ),
        read=[tensor],
        written=gather_list or (),
        async_op=async_op,
    )


@labelled()
def scatter(
    tensor: torch.Tensor,
    scatter_list: Tensors | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sets `tensor` to the `scatter_list[own rank]` of process `src`."""
    return run_on_host(
        lambda sources, targets, asynchronous: dist.scatter(
            targets[0], sources or None, src, group, asynchronous
        ),
        read=scatter_list or (),
        written=[tensor],
        async_op=async_op,
    )


@labelled()
def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sends part i of `tensor` to process i; sets `output` to the received parts, in order."""
    return run_on_host(
        lambda sources, targets, asynchronous: dist.all_to_all_single(
            targets[0], sources[0], output_split_sizes, input_split_sizes, group, asynchronous
        ),
        read=[tensor],
        written=[output],
        async_op=async_op,
    )


@labelled()
def all_to_all(
    output_tensor_list: Tensors,
    input_tensor_list: Tensors,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Sends `input_tensor_list[i]` to process i, and receives `output_tensor_list[i]` from it."""

    def call(sources: list[torch.Tensor], targets: list[torch.Tensor], _: bool) -> Any:
        # gloo exchanges single tensors only.
        received = torch.cat([t.reshape(-1) for t in targets])
        sizes = [t.numel() for t in targets]
        dist.all_to_all_single(
            received,
            torch.cat([t.detach().reshape(-1) for t in sources]),
            sizes,
            [t.numel() for t in sources],
            group,
        )
        for target, part in zip(targets, received.split(sizes), strict=True):
            target.copy_(part.reshape(target.shape))
        return Done()

    return run_on_host(call, read=input_tensor_list, written=output_tensor_list, async_op=async_op)
