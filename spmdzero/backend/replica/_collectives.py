"""Collectives of `torch.distributed` inside of a forward: over the replicas, not over hosts.

A rank of DeepSpeed's has a device's rows, so what a model's Python hands to its ranks is what the
replicas hand each other here. The size of the group is their number, and the rank differs on each.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from spmdzero._user_line import frames_below
from spmdzero.backend._current import arrays, programs, runtime
from spmdzero.backend.protocols._mesh import Mesh
from spmdzero.backend.replica._device_rank import DeviceRank
from spmdzero.backend.replica._readers import current_reader
from spmdzero.errors import ReplicaRegionError
from spmdzero.plan import names_of

_HOSTS = "spmdzero.backend.hosts."
_SUMS = ("SUM", "AVG")
_OF_STACKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "MAX": lambda stacked: stacked.amax(0),
    "MIN": lambda stacked: stacked.amin(0),
    "PRODUCT": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "BAND": lambda stacked: functools.reduce(torch.bitwise_and, stacked.unbind(0)),
    "BOR": lambda stacked: functools.reduce(torch.bitwise_or, stacked.unbind(0)),
    "BXOR": lambda stacked: functools.reduce(torch.bitwise_xor, stacked.unbind(0)),
}


class RowCollectives:
    """Carries what replicas hand each other in one pass through the region.

    Args:
        mesh: the devices.
        replica: this replica's number, `[1]` int32 in replica space.
        line: names the user's line.
        alone: whether each replica has all rows, and so is a world of its own.
        whole: whether there are no replicas, but one program that sees the rows of all devices.

    Attributes:
        size: number of replicas that the model's Python is told of.
        used: whether its Python has asked for a rank or a collective.
    """

    def __init__(
        self,
        *,
        mesh: Mesh,
        replica: torch.Tensor | None,
        line: Callable[[], str],
        alone: bool = False,
        whole: bool = False,
    ) -> None:
        self._mesh, self._replica, self._line, self.whole = mesh, replica, line, whole
        self.size = 1 if alone or whole else mesh.replicas
        self.used = False
        self._rank = DeviceRank(self.size, self._number, self.error)

    def __enter__(self) -> "RowCollectives":
        _thread.inside.append(self)
        self._rank.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._rank.__exit__(kind, error, trace)
        _thread.inside.pop()
        if kind is None:
            self._rank.finish()
        if kind is not None or not self.used:
            # Without this circle it goes now, with what the pass has noted. Python's collector
            # would else decide when, and what is alive then is a result of a step's program.
            del self._rank

    def error(self, message: str) -> ReplicaRegionError:
        """The error about a call of the user's line."""
        return ReplicaRegionError(f"{self._line()}: {message}")

    def lonely(self, what: str) -> ReplicaRegionError:
        """The error about what one replica would do alone."""
        return self.error(
            f"{what} in a forward: one program runs on all devices, and none of them can send or "
            "receive alone. Use all_gather, all_reduce, reduce_scatter or broadcast"
        )

    def require_size(self, given: int, what: str) -> None:
        """Checks a number of parts; `what` has a place for it in the message.

        Raises:
            ReplicaRegionError: it isn't the number of replicas.
        """
        if given != self.size:
            raise self.error(
                f"a collective in a forward is given {what.format(given)}, and {self.size} devices "
                "hand each other their rows there. Ask dist.get_world_size() in the forward: "
                "outside of it, as in __init__, it is the number of hosts"
            )

    def source(self, rank: int) -> int:
        """The replica with this number; raises ReplicaRegionError if there is none."""
        if not 0 <= rank < self.size:
            raise self.error(f"a broadcast from rank {rank} in a forward of {self.size} devices")
        return rank

    def rank(self) -> Any:
        """The replica's number: a 0-dim int64 tensor that differs on each, 0 for a single one."""
        self._begin("get_rank")
        return 0 if self.size == 1 else self._rank.asked()

    def _number(self) -> torch.Tensor:
        return self._own_number[0].to(torch.int64)

    @property
    def _own_number(self) -> torch.Tensor:
        assert self._replica is not None, "a world of several replicas has numbers"
        return self._replica

    def _begin(self, what: str) -> None:
        """Notes that the model's Python asks for `what`, and refuses what has no one meaning."""
        self.used = True
        if self.whole and runtime.process_count() > 1:
            raise self.error(
                f'{what} in a forward with "spmd": {{"forward": "global"}} on several hosts: the '
                "forward sees the rows of all devices already, and has nothing to ask the hosts "
                'for. Leave the gather out, or write "forward": "region"'
            )
        sharing = self._mesh.spec.sharing
        if self.size > 1 and sharing:
            axes = " and ".join(f'"{axis}": {count}' for axis, count in sharing.items())
            raise self.error(
                f"{what} in a forward on a mesh with {axes}, along which devices share rows: "
                "DeepSpeed's ranks would hand each other these rows several times over. Leave the "
                "axis out, or compute the loss of all rows outside of the forward"
            )

    def filled(self, tensors: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """Records what a gather has put into the places of a list, and what it gathered."""
        if self.size > 1:
            self._rank.filled(tensors, own)

    def stacked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every replica's tensor, `[n, *shape]`."""
        self._begin("a collective")
        if self.size == 1:
            return tensor[None]
        if not arrays.is_mine(tensor):
            # Python has made it, once for all replicas of this host.
            if runtime.process_count() > 1:
                raise self.error(
                    "a collective in a forward is given a tensor on the CPU, of which each host "
                    "has its own. Move it to the devices first: .to(x.device)"
                )
            return tensor.expand(self.size, *tensor.shape)
        with programs.scope("zero.collective/rows"):
            return self._mesh.all_gather(tensor.contiguous())

    def reduced(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """The combination of all replicas' tensors, the same on each."""
        self._begin("a collective")
        if op in _SUMS:
            total = self._summed(tensor)
            return self._mean(total) if op == "AVG" else total
        if op not in _OF_STACKED:
            raise self.error(f"all_reduce with {op} in a forward: use ReduceOp.SUM, AVG or MAX")
        return _OF_STACKED[op](self.stacked(tensor))

    def scattered(self, stacked: torch.Tensor, op: str) -> torch.Tensor:
        """This replica's part of the combination of all replicas' `[n, *shape]`."""
        self._begin("a collective")
        if self.size == 1:
            return stacked[0]
        if op not in _SUMS or not arrays.is_mine(stacked):
            return self.own(self.reduced(stacked, op))
        with programs.scope("zero.collective/rows"):
            for axis in self._axes:
                stacked = self._mesh.reduce_scatter(stacked.contiguous(), axis=axis, dim=0)
        return self._mean(stacked[0]) if op == "AVG" else stacked[0]

    def own(self, stacked: torch.Tensor) -> torch.Tensor:
        """This replica's place in `[n, *shape]`."""
        if self.size == 1:
            return stacked[0]
        return stacked.index_select(0, self._own_number.to(torch.int64))[0]

    @property
    def _axes(self) -> tuple[str, ...]:
        return names_of(self._mesh.batch_spec(1)[0])

    def _summed(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.size == 1 or not arrays.is_mine(tensor):
            return self.stacked(tensor).sum(0, dtype=tensor.dtype)
        with programs.scope("zero.collective/rows"):
            for axis in self._axes:
                tensor = self._mesh.all_reduce(tensor.contiguous(), axis=axis)
        return tensor

    def _mean(self, total: torch.Tensor) -> torch.Tensor:
        whole = None if total.is_floating_point() else "trunc"
        return torch.div(total, self.size, rounding_mode=whole)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.inside: list[RowCollectives | None] = []


_thread = _Thread()


def rows_here() -> RowCollectives | None:
    """The collectives of this thread's pass through a region; None outside."""
    rows = _thread.inside[-1] if _thread.inside else None
    if rows is None:
        return None
    if rows.whole:
        return None if runtime.process_count() > 1 and _asked_by_hosts() else rows
    # Where spmdzero itself reads there is no reader, and it asks the other hosts.
    return rows if current_reader() is not None else None


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Context in which this thread isn't inside of a region."""
    _thread.inside.append(None)
    try:
        yield
    finally:
        _thread.inside.pop()


def _asked_by_hosts() -> bool:
    """Whether spmdzero itself asks the other hosts."""
    return any(
        frame.f_globals.get("__name__", "").startswith(_HOSTS)
        and not frame.f_globals["__name__"].endswith("._device_tensors")
        for frame in frames_below()
    )
