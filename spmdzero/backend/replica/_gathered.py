"""Parameters that rest as shards, gathered where an operation of the region uses them."""

import collections
import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from spmdzero.backend._current import arrays, programs
from spmdzero.backend.forms._order import after
from spmdzero.backend.protocols._mesh import Mesh
from spmdzero.backend.protocols._region import GradientSink, PartsOfGradients
from spmdzero.backend.replica._boundary import enter_part
from spmdzero.plan import Layout

_CAST = torch.ops.aten._to_copy.default
# How many gathered parameters wait for a further use. Two neighbours often share one, as a loss and
# its gradient do; what waits longer costs memory.
_LIVE = 3
# A gather may start when the operations of so many uses before it are done: with none a TPU has
# nothing to compute meanwhile, with more than one it holds more than it hides (v5e:2x4).
_AHEAD = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """What a whole parameter is gathered from.

    Attributes:
        name: the parameter's.
        shown: the name under which the ledger has it.
        local: this device's part, in replica space.
        dim: along which the parts are joined.
        parameter: the whole one, in global space.
        sink: takes its gradient.
        stamp: that of the whole parameter's writes, which no longer is the shard's after one.
    """

    name: str
    shown: str
    local: torch.Tensor
    dim: int
    parameter: torch.Tensor
    sink: GradientSink
    stamp: Any = None


class Gathering(Protocol):
    """What a backend knows of its tensors, by which a parameter is gathered where it is used."""

    def all_gather(self, local: torch.Tensor, *, axis: str, dim: int) -> torch.Tensor:
        """What the devices of an axis have, joined along `dim`; in replica space."""

    def source_of(self, tensor: Any) -> Any:
        """What tells that which `tensor` is, or views, from others; it lives as long as they do.

        It is hashed by identity and may be weakly referred to. A write leaves it as it is. None
        for what is not on the devices.
        """

    def is_whole(self, tensor: Any) -> bool:
        """Whether it is all of its source as it is, rather than a view of it."""

    def viewed_as(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Of `whole`, what `tensor` is of its source."""

    def compute_on_demand(self, tensor: torch.Tensor) -> None:
        """Leaves `tensor` out of the programs that are started, until it is asked for."""


class GatheredAtUse:
    """Gathers a parameter for each use, in forward and again in backward, and lets it go.

    A module sees a stand-in of the parameter's own shape, which autograd saves and views are taken
    of. Below autograd each operation that is given a stand-in, or a view of one, is given the
    parameter gathered from its shard in its place. XLA would make one gather of all of them at the
    first use and keep its result for the last, so each is tied to what was computed shortly before
    it (`after`). The stand-in itself is a gather that nothing uses, and so none.

    A cast of a stand-in to a narrower dtype is a stand-in too: the shard is cast, and the narrow
    numbers cross the wire.

    Args:
        mesh: the devices.
        layouts: name -> where a parameter rests, of those that rest as shards.
        gathering: the backend's.
        parts: how a loop reduces their gradients.
        seed: how many times the global loss's gradients those inside of the region are.
        lets_go: whether what is gathered is let go when others are, and gathered again.
    """

    def __init__(
        self,
        mesh: Mesh,
        layouts: Mapping[str, Layout],
        gathering: Gathering,
        parts: Callable[[], PartsOfGradients],
        *,
        seed: int,
        lets_go: bool = True,
    ) -> None:
        self._mesh, self.layouts, self._gathering = mesh, layouts, gathering
        self._parts, self._seed, self._lets_go = parts, seed, lets_go
        self._shards: weakref.WeakKeyDictionary[Any, Shard] = weakref.WeakKeyDictionary()
        self._live: collections.OrderedDict[int, tuple[Shard, torch.Tensor]]
        self._forget()

    def in_body(self) -> "GatheredAtUse":
        """Another one, for a loop's body, which holds what it gathers until its turn ends."""
        return GatheredAtUse(
            self._mesh, self.layouts, self._gathering, self._parts, seed=self._seed, lets_go=False
        )

    def __enter__(self) -> None:
        """Around a forward, or a backward pass."""

    def __exit__(self, *_: object) -> None:
        self._forget()

    def passed(self, made: torch.Tensor) -> None:
        """A loop has run, and has made `made`: what was gathered before is not kept through it."""
        self._forget()
        self._latest = made

    def _forget(self) -> None:
        # What a live tensor holds becomes a result of the program.
        self._live = collections.OrderedDict()
        self._latest: torch.Tensor | None = None
        self._before: collections.deque[torch.Tensor | None] = collections.deque(maxlen=_AHEAD + 1)

    def enter(self, parameter: torch.Tensor, name: str, sink: GradientSink) -> torch.Tensor:
        """The stand-in for a global parameter, `[*shape]` in replica space."""
        layout = self.layouts[name]
        assert layout.placement.dim is not None
        local = self._mesh.enter(parameter, layout.spec)
        dim = layout.placement.dim
        return self.stand_in(
            Shard(name=name, shown=name, local=local, dim=dim, parameter=parameter, sink=sink)
        )

    def part(self, shard: Shard, gradient: torch.Tensor) -> torch.Tensor | None:
        """This device's part of the sum over replicas of `gradient`; None where nobody wants it."""
        parts = self._parts()
        if not parts.is_trained(shard.name):
            return None
        return parts.part(shard.name, gradient, shown=shard.shown)

    def awaiting_part(self, shard: Shard, dtype: torch.dtype) -> torch.Tensor:
        """What autograd hands the parts of a parameter's gradient to, in their dtype."""
        return enter_part(
            shard.parameter,
            shard.name,
            shard.sink,
            there=lambda _: shard.local.to(dtype),
            parts=self._parts(),
            seed=self._seed,
        )

    def stand_in(self, shard: Shard) -> torch.Tensor:
        """The whole parameter of a shard, which is gathered where an operation uses it."""
        whole = self._whole(shard, shard.local)
        # It is live as long as autograd keeps it, and a read in between would gather it.
        self._gathering.compute_on_demand(whole)
        stamped = dataclasses.replace(shard, stamp=arrays.write_stamp(whole))
        self._shards[self._gathering.source_of(whole)] = stamped
        return whole

    def _whole(self, shard: Shard, local: torch.Tensor) -> torch.Tensor:
        with programs.scope(f"zero.parameter/{shard.shown}"):
            return self._gathering.all_gather(local, axis="fsdp", dim=shard.dim)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func` returns of operands that are gathered for it."""
        if func.is_view or func._schema.is_mutable:
            # A view is one of the stand-in; what is written in place is the stand-in's own.
            return func(*args, **kwargs)
        if func is _CAST and (shard := self._narrowed(args[0], kwargs)) is not None:
            cast = func(shard.local, *args[1:], **kwargs)
            return self.stand_in(dataclasses.replace(shard, local=cast))
        args, kwargs = tree_map_only(torch.Tensor, self._operand, (args, kwargs))
        made = func(*args, **kwargs)
        self._note(made)
        return made

    def _narrowed(self, tensor: torch.Tensor, cast: Mapping[str, Any]) -> Shard | None:
        """The shard to cast before it is gathered; None where wider numbers would be gathered."""
        dtype = cast.get("dtype") or tensor.dtype
        if dtype.itemsize > tensor.dtype.itemsize or not self._gathering.is_whole(tensor):
            return None
        return self.shard_of(tensor)

    def shard_of(self, tensor: Any) -> Shard | None:
        """What `tensor` stands for, or views; None where it is not a stand-in, or was written."""
        source = self._gathering.source_of(tensor)
        shard = None if source is None else self._shards.get(source)
        written = shard is not None and arrays.write_stamp(tensor) != shard.stamp
        return None if written else shard

    def _operand(self, tensor: torch.Tensor) -> torch.Tensor:
        shard = self.shard_of(tensor)
        if shard is None:
            return tensor
        if id(shard) in self._live:
            self._live.move_to_end(id(shard))
        else:
            local = self._tied(shard.local) if self._lets_go else shard.local
            self._live[id(shard)] = shard, self._whole(shard, local)
            self._before.append(self._latest)
            while self._lets_go and len(self._live) > _LIVE:
                self._live.popitem(last=False)
        return self._gathering.viewed_as(tensor, self._live[id(shard)][1])

    def _tied(self, local: torch.Tensor) -> torch.Tensor:
        """A shard that can't be gathered before what was computed shortly before."""
        earlier = self._before[0] if self._before else None
        tie = self._latest if earlier is None else earlier
        return local if tie is None else after(local, tie)

    def _note(self, made: Any) -> None:
        for tensor in tree_leaves(made):
            if not isinstance(tensor, torch.Tensor) or not arrays.is_mine(tensor):
                continue
            if tensor.is_floating_point() and tensor.numel():
                self._latest = tensor
                return
