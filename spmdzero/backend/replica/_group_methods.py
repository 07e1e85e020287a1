"""Methods of torch's process group that collectives inside of a forward call.

All of `torch.distributed`'s functions come to these, however they were imported. They are replaced
as long as a thread is inside of a forward, and answer that thread alone.
"""

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives, device_mesh
from torch.distributed.nn import functional

from spmdzero.backend._ended_work import ended_work
from spmdzero.backend.replica._collectives import RowCollectives, outside, rows_here
from spmdzero.backend.replica._differentiable import (
    DIFFERENTIABLE,
    operation_of,
    write_below_autograd,
)
from spmdzero.backend.replica._sync_norm import sync_batch_norm

_GROUP: Any = getattr(dist, "ProcessGroup", None)
Tensors = Sequence[torch.Tensor]


def _all_reduce(rows: RowCollectives, tensors: Tensors, opts: Any = None) -> None:
    for tensor in tensors:
        write_below_autograd(tensor, rows.reduced(tensor.detach(), operation_of(opts)))


def _broadcast(rows: RowCollectives, tensors: Tensors, opts: Any = None) -> None:
    for tensor in tensors:
        write_below_autograd(
            tensor,
            rows.stacked(tensor.detach())[rows.source(opts.rootRank if opts is not None else 0)],
        )


def _all_gather(
    rows: RowCollectives, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
) -> None:
    for places, tensor in zip(outputs, inputs, strict=True):
        rows.require_size(len(places), "a list with {} places")
        for place, value in zip(places, rows.stacked(tensor.detach()), strict=True):
            write_below_autograd(place, value)
        rows.filled(places, tensor)


def _all_gather_base(
    rows: RowCollectives, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
) -> None:
    _require_parts(rows, output, tensor)
    write_below_autograd(output, rows.stacked(tensor.detach()))


def _all_gather_bases(
    rows: RowCollectives, outputs: Tensors, inputs: Tensors, opts: Any = None
) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        _all_gather_base(rows, output, tensor)


def _reduce_scatter(
    rows: RowCollectives, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
) -> None:
    for output, parts in zip(outputs, inputs, strict=True):
        rows.require_size(len(parts), "a list with {} places")
        write_below_autograd(
            output, rows.scattered(torch.stack(list(parts)).detach(), operation_of(opts))
        )


def _reduce_scatter_base(
    rows: RowCollectives, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
) -> None:
    _require_parts(rows, tensor, output)
    stacked = tensor.detach().reshape(rows.size, *output.shape)
    write_below_autograd(output, rows.scattered(stacked, operation_of(opts)))


def _reduce_scatter_bases(
    rows: RowCollectives, outputs: Tensors, inputs: Tensors, opts: Any = None
) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        _reduce_scatter_base(rows, output, tensor, opts)


def _barrier(rows: RowCollectives, opts: Any = None) -> None:
    """Waits for nobody: all replicas run one program."""


def _require_parts(rows: RowCollectives, whole: torch.Tensor, part: torch.Tensor) -> None:
    if whole.numel() != rows.size * part.numel():
        rows.require_size(-1, f"a tensor {list(whole.shape)} for parts {list(part.shape)}")


_ANSWERS: dict[str, Callable[..., None]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "broadcast": _broadcast,
    "allgather": _all_gather,
    "allgather_coalesced": _all_gather,
    "_allgather_base": _all_gather_base,
    "allgather_into_tensor_coalesced": _all_gather_bases,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_bases,
    "barrier": _barrier,
    # What torch 2.14 calls four of these.
    "all_gather_single": _all_gather_base,
    "all_gather_single_coalesced": _all_gather_bases,
    "reduce_scatter_single": _reduce_scatter_base,
    "reduce_scatter_single_coalesced": _reduce_scatter_bases,
}
# One of their ranks has what the others haven't, which one program for all replicas can't say.
_REFUSED = (
    "reduce", "gather", "scatter", "alltoall", "alltoall_base", "send", "recv", "recv_anysource",
    "monitored_barrier", "all_to_all_single", "gather_single", "gather_into_tensor",
)  # fmt: skip


def _answering(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    answer = _ANSWERS.get(name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = rows_here()
        if rows is None:
            return original(self, *args, **kwargs)
        if not _has_all_hosts(self):
            raise _of_hosts(rows, name)
        if answer is None:
            raise rows.lonely(f"torch.distributed's {name}")
        answer(rows, *args, **kwargs)
        return ended_work()

    return method


def _of_hosts(rows: RowCollectives, name: str) -> Exception:
    return rows.error(
        f"{name} in a forward over a group that new_group has made, whose members are hosts. Leave "
        "the group out: collectives in a forward are over all devices"
    )


def _has_all_hosts(group: Any) -> bool:
    world = dist.group.WORLD
    return group is world or (
        not _answers_itself(group) and (_sizes["size"](group) == _sizes["size"](world))
    )


def _answers_itself(group: Any) -> bool:
    """Whether a class of Python's is the group, whose members aren't hosts."""
    return type(group) is not _GROUP


@dataclasses.dataclass(frozen=True)
class _Function:
    """Stands for what `torch.distributed.nn` applies: torch's own outside of a forward."""

    name: str
    original: Any
    answer: Callable[..., Any]

    def apply(self, *args: Any) -> Any:
        """See `torch.autograd.Function`."""
        rows = rows_here()
        if rows is None:
            return self.original.apply(*args)
        groups = [arg for arg in args if isinstance(arg, _GROUP)]
        if any(map(_answers_itself, groups)):
            return self.original.apply(*args)
        if not all(map(_has_all_hosts, groups)):
            raise _of_hosts(rows, self.name.strip("_"))
        return self.answer(rows, *(arg for arg in args if arg is not None and arg not in groups))


def _backward_outside(original: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of what was computed outside of a forward, also where a forward's runs."""

    @functools.wraps(original)
    def backward(*args: Any) -> Any:
        with outside():
            return original(*args)

    return backward


def _size(self: Any) -> Any:
    rows = rows_here()
    own = _sizes["size"](self)
    return own if rows is None or not _has_all_hosts(self) else rows.size


def _rank(self: Any) -> Any:
    rows = rows_here()
    return _sizes["rank"](self) if rows is None or not _has_all_hosts(self) else rows.rank()


def _norm_of_all(self: Any, input: torch.Tensor) -> Any:
    rows = rows_here()
    if rows is None:
        return _originals[nn.SyncBatchNorm, "forward"](self, input)
    if self.process_group is not None and not _has_all_hosts(self.process_group):
        raise _of_hosts(rows, "SyncBatchNorm")
    return sync_batch_norm(rows, self, input)


def _asking_devices(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's meshes and functional collectives, which is refused in a forward."""

    @functools.wraps(original)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        rows = rows_here()
        if rows is None:
            return original(*args, **kwargs)
        raise rows.error(
            f"{name} in a forward: its groups are of hosts, and devices hand each other rows "
            "there. Use torch.distributed.nn.all_gather or all_reduce, without a group; tensors "
            "are split over devices by the config's spmd.mesh"
        )

    return refuse


# Each is what all public ones go through: functional collectives by their group (since torch 2.14)
# or its name, DTensors by their place in a mesh, which a mesh that is made in the forward has not
# even got.
_OF_MESHES: tuple[tuple[Any, str, str], ...] = (
    (_functional_collectives, "_resolve_group", "a functional collective"),
    (_functional_collectives, "_resolve_group_name", "a functional collective"),
    (device_mesh.DeviceMesh, "__init__", "a DeviceMesh"),
    (device_mesh.DeviceMesh, "get_coordinate", "a DTensor"),
    (device_mesh.DeviceMesh, "get_group", "a DeviceMesh's group"),
)
_sizes: dict[str, Any] = {name: getattr(_GROUP, name, None) for name in ("size", "rank")}
_lock = threading.Lock()
_inside = 0
_originals: dict[tuple[Any, str], Any] = {}


@contextlib.contextmanager
def collectives_over(rows: RowCollectives) -> Iterator[RowCollectives]:
    """Context in which this thread's collectives of torch are those of `rows`."""
    _enter()
    try:
        with rows:
            yield rows
    finally:
        _leave()


def _enter() -> None:
    global _inside
    with _lock:
        _inside += 1
        if _inside > 1 or _GROUP is None:
            return
        changed: dict[tuple[Any, str], Any] = {(_GROUP, "size"): _size, (_GROUP, "rank"): _rank}
        for name in (*_ANSWERS, *_REFUSED):
            if hasattr(_GROUP, name):
                changed[_GROUP, name] = _answering(name, getattr(_GROUP, name))
        for name, answer in DIFFERENTIABLE.items():
            if hasattr(functional, name):
                original = getattr(functional, name)
                changed[functional, name] = _Function(name, original, answer)
                # In a forward its nodes aren't torch's.
                changed[original, "backward"] = staticmethod(_backward_outside(original.backward))
        changed[nn.SyncBatchNorm, "forward"] = _norm_of_all
        for owner, name, shown in _OF_MESHES:
            if hasattr(owner, name):
                changed[owner, name] = _asking_devices(shown, getattr(owner, name))
        if (loaded := sys.modules.get("torch.distributed.tensor")) is not None:
            refuse = _asking_devices("a DTensor", loaded.DTensor.from_local)
            changed[loaded.DTensor, "from_local"] = staticmethod(refuse)
        for (owner, name), value in changed.items():
            # A static method is restored as what it is.
            _originals[owner, name] = vars(owner).get(name) or getattr(owner, name)
            setattr(owner, name, value)


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0:
            for (owner, name), value in _originals.items():
                setattr(owner, name, value)
            _originals.clear()
