"""Parameters stored as shards, gathered where an operation of the region uses them."""

import collections
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from spmdzero.backend._current import arrays, programs
from spmdzero.backend.forms._order import after
from spmdzero.backend.forms._quantized import (
    ABSMAX,
    LEAST,
    QUANTIZED,
    absmax,
    largest,
    quantized,
)
from spmdzero.backend.forms._tree import found, mapped
from spmdzero.backend.protocols._mesh import Mesh
from spmdzero.backend.protocols._region import GradientSink, PartsOfGradients
from spmdzero.backend.replica._border import enter_part
from spmdzero.plan import Layout

_CAST = torch.ops.aten._to_copy.default
# What of a whole parameter follows from its shards, which have fewer bytes to gather, or none.
_OF_SHARDS = {_CAST, QUANTIZED, ABSMAX}
# Number of gathered parameters that wait for another use. Neighbouring operations often share a
# parameter, as a loss and its gradient do; a longer wait costs memory.
_LIVE = 3
# A gather may start when the operations of this many earlier uses are done. What libtpu makes of
# other numbers is in docs/design.md: with its flags 1 takes less time than 0.
_AHEAD = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """The shard from which a whole parameter is gathered.

    Attributes:
        name: of the parameter.
        shown: the name in the ledger.
        local: this device's part, in replica space.
        dim: the dim along which the parts are joined.
        tensor_dim: the dim that stays split over the axis ``tensor``, None for none.
        parameter: the whole parameter, in global space.
        sink: takes the parameter's gradient.
        widened: the dtypes to which the whole is cast, one after the other; each is wider than
            that of `local`.
        stamp: the write stamp of the stand-in; another one means that the shard is out of date.
    """

    name: str
    shown: str
    local: torch.Tensor
    dim: int
    tensor_dim: int | None
    parameter: torch.Tensor
    sink: GradientSink
    widened: tuple[torch.dtype, ...] = ()
    stamp: Any = None


class Gathering(Protocol):
    """A backend's functions for gathering a parameter where it is used."""

    def all_gather(
        self, local: torch.Tensor, *, axis: str, dim: int, tensor_dim: int | None = None
    ) -> torch.Tensor:
        """The parts of all devices of a mesh axis, joined along `dim`; in replica space.

        Args:
            local: the part of a replica.
            axis: the mesh axis.
            dim: the tensor dim along which the parts are joined.
            tensor_dim: the dim that stays split over the axis ``tensor``, None for none.
        """

    def source_of(self, tensor: Any) -> Any:
        """An object that identifies the tensor which `tensor` is or views, and lives as long.

        It is hashed by identity and can be weakly referenced. Writes don't change it. None for a
        tensor that is not on the devices.
        """

    def is_whole(self, tensor: Any) -> bool:
        """Whether `tensor` is its source itself, not a view of it."""

    def viewed_as(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """The same view of `whole` that `tensor` is of its source."""

    def stand_in(self, whole: torch.Tensor) -> Any:
        """Registers `whole` as a stand-in, and returns its source.

        Where the backend can, it leaves `whole` out of the programs that are started, until its
        value is asked for.
        """

    def stamp(self, tensor: torch.Tensor) -> Any:
        """A value that changes when the source of `tensor` is written."""

    def takes_view(self, func: Any) -> bool:
        """Whether the operation returns views of its first operand."""

    def note_view(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        """Takes note of the views that `func` returned."""


class GatheredAtUse:
    """Gathers a parameter for each use, in the forward and again in the backward, and drops it.

    A module sees a stand-in with the parameter's full shape, which autograd saves and of which
    views are taken. Below autograd, an operation that is given a stand-in, or a view of one, gets
    the parameter gathered from its shard in its place. XLA would merge all gathers of a parameter
    at the first use and keep the result for the last. So each gather is tied to a value computed
    shortly before it (`after`). The stand-in itself is a gather that no operation uses, so it is
    never done.

    A cast of a stand-in is a stand-in too. The narrower numbers cross the wire: a cast to them is
    one of the shard, with a scale too, and a cast to wider ones comes after the gather.

    Args:
        mesh: the devices.
        layouts: name -> layout, of the parameters that are stored as shards.
        gathering: the backend's functions.
        parts: makes what reduces the parameters' gradients in loops.
        seed: gradients in the region are `seed` times those of the global loss.
        lets_go: whether a gathered parameter is dropped after others, and gathered again.
        in_int8: whether parameters cross in int8, with a scale for each row of a shard.
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
        in_int8: bool = False,
    ) -> None:
        self._mesh, self.layouts, self._gathering = mesh, layouts, gathering
        self._parts, self._seed, self._lets_go, self._in_int8 = parts, seed, lets_go, in_int8
        self._shards: weakref.WeakKeyDictionary[Any, Shard] = weakref.WeakKeyDictionary()
        self._live: collections.OrderedDict[int, tuple[torch.Tensor, torch.Tensor]]
        self._forget()

    def in_body(self) -> "GatheredAtUse":
        """Another one, for a loop's body, which holds what it gathers until its turn ends."""
        return GatheredAtUse(
            self._mesh, self.layouts, self._gathering, self._parts, seed=self._seed,
            lets_go=False, in_int8=self._in_int8,
        )  # fmt: skip

    def __enter__(self) -> None:
        """Context around a forward, or a backward pass."""

    def __exit__(self, *_: object) -> None:
        self._forget()

    def passed(self, made: torch.Tensor) -> None:
        """A loop has run, and has made `made`: what was gathered before is not kept through it."""
        self._forget()
        self._latest = made

    def _forget(self) -> None:
        # A tensor that is alive at the end would become a result of the program.
        self._live = collections.OrderedDict()
        self._latest: torch.Tensor | None = None
        self._before: collections.deque[torch.Tensor | None] = collections.deque(maxlen=_AHEAD + 1)

    def enter(self, parameter: torch.Tensor, name: str, sink: GradientSink) -> torch.Tensor:
        """The stand-in for a global parameter, `[*shape]` in replica space."""
        layout = self.layouts[name]
        assert layout.placement.dim is not None
        local = self._mesh.enter(parameter, layout.spec)
        shard = Shard(
            name=name,
            shown=name,
            local=local,
            dim=layout.placement.dim,
            tensor_dim=layout.placement.tensor_dim,
            parameter=parameter,
            sink=sink,
        )
        return self.stand_in(shard)

    def part(self, shard: Shard, gradient: torch.Tensor) -> torch.Tensor | None:
        """This device's part of the sum over replicas of `gradient`; None where nobody wants it."""
        parts = self._parts()
        if not parts.is_trained(shard.name):
            return None
        return parts.part(shard.name, gradient, shown=shard.shown)

    def awaiting_part(self, shard: Shard, dtype: torch.dtype) -> torch.Tensor:
        """Takes from autograd the parts of a parameter's gradient, in their dtype."""
        spec, dim = self._mesh.spec, shard.dim
        length = shard.local.shape[dim] * spec.fsdp // spec.parts(spec.states_of_region)
        return enter_part(
            shard.parameter,
            shard.name,
            shard.sink,
            there=lambda _: shard.local.narrow(dim, 0, length).to(dtype),
            parts=self._parts(),
            seed=self._seed,
        )

    def stand_in(self, shard: Shard) -> torch.Tensor:
        """The whole parameter of a shard, which is gathered where an operation uses it."""
        whole = _widened(shard, self._gathered(shard, shard.local))
        # Autograd keeps the stand-in alive, and a read in between would gather it.
        source = self._gathering.stand_in(whole)
        self._shards[source] = dataclasses.replace(shard, stamp=self._gathering.stamp(whole))
        return whole

    def _gathered(self, shard: Shard, local: torch.Tensor) -> torch.Tensor:
        with programs.scope(f"zero.parameter/{shard.shown}"):
            if self._in_int8 and local.is_floating_point() and local.element_size() > 1:
                return self._through_int8(shard, local)
            return self._gathering.all_gather(
                local, axis="fsdp", dim=shard.dim, tensor_dim=shard.tensor_dim
            )

    def _through_int8(self, shard: Shard, local: torch.Tensor) -> torch.Tensor:
        """A gathered parameter that crossed in int8, in its own dtype again.

        Symmetric, as DeepSpeed's quantizer, whose groups are of at most 8,000 elements
        (deepspeed/runtime/zero/partition_parameters.py, CUDAQuantizer).
        """
        size = absmax(local, (-1,))
        few = quantized(local, largest(torch.int8) / size.clamp(min=LEAST), torch.int8)
        last = local.dim() - 1

        def gathered(tensor: torch.Tensor, tensor_dim: int | None) -> torch.Tensor:
            return self._gathering.all_gather(
                tensor, axis="fsdp", dim=shard.dim, tensor_dim=tensor_dim
            )

        split = shard.tensor_dim
        units = gathered(size / largest(torch.int8), None if split == last else split)
        whole = gathered(few, split).float()
        if shard.dim == last:
            # Of a row each device has a part, and its scale.
            parts = whole.unflatten(last, (units.shape[last], -1))
            return (parts * units[..., None]).flatten(last).to(local.dtype)
        return (whole * units).to(local.dtype)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `func` for operands that are gathered for it."""
        if func._schema.is_mutable:
            # A write in place goes to the stand-in itself.
            return func(*args, **kwargs)
        if self._gathering.takes_view(func):
            made = func(*args, **kwargs)
            self._gathering.note_view(func, args, kwargs, made)
            return made
        if func in _OF_SHARDS and (shard := self._whole(args[0])) is not None:
            # What an earlier cast has lost stays lost: integers have no fraction.
            own = _cast(shard.local, shard.widened)
            if func is ABSMAX:
                return self._largest(shard, own) if not args[1] else self._computed(func, args)
            if func is QUANTIZED and args[1].dim():
                return self._computed(func, args)
            cast = func(own, *args[1:], **kwargs)
            if cast.element_size() > shard.local.element_size():
                widened = (*shard.widened, cast.dtype)
                return self.stand_in(dataclasses.replace(shard, widened=widened))
            return self.stand_in(dataclasses.replace(shard, local=cast, widened=()))
        return self._computed(func, args, kwargs)

    def _computed(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        args, kwargs = mapped((args, dict(kwargs)), torch.Tensor, self._operand)
        made = func(*args, **kwargs)
        self._note(made)
        return made

    def _whole(self, tensor: Any) -> Shard | None:
        """The shard of a stand-in that is no view; None for other tensors."""
        return self.shard_of(tensor) if self._gathering.is_whole(tensor) else None

    def _largest(self, shard: Shard, own: torch.Tensor) -> torch.Tensor:
        """The largest size in a whole parameter, of those in its shards."""
        with programs.scope(f"zero.parameter/{shard.shown}"):
            mine = ABSMAX(own, []).reshape(1)
            return self._gathering.all_gather(mine, axis="fsdp", dim=0).amax()

    def shard_of(self, tensor: Any) -> Shard | None:
        """Returns what `tensor` stands for, or views; None for no stand-in, or a written one."""
        source = self._gathering.source_of(tensor)
        shard = None if source is None else self._shards.get(source)
        written = shard is not None and self._gathering.stamp(tensor) != shard.stamp
        return None if written else shard

    def _operand(self, tensor: torch.Tensor) -> torch.Tensor:
        shard = self.shard_of(tensor)
        if shard is None:
            return tensor
        # The stand-ins of one shard, in whatever dtypes, share what is gathered.
        key = id(shard.local)
        if key in self._live:
            self._live.move_to_end(key)
        else:
            local = self._tied(shard.local) if self._lets_go else shard.local
            self._live[key] = shard.local, self._gathered(shard, local)
            self._before.append(self._latest)
            while self._lets_go and len(self._live) > _LIVE:
                self._live.popitem(last=False)
        return self._gathering.viewed_as(tensor, _widened(shard, self._live[key][1]))

    def _tied(self, local: torch.Tensor) -> torch.Tensor:
        """A shard that can't be gathered before what was computed shortly before."""
        earlier = self._before[0] if self._before else None
        tie = self._latest if earlier is None else earlier
        return local if tie is None else after(local, tie)

    def _note(self, made: Any) -> None:
        for tensor in found(made, torch.Tensor):
            if not arrays.is_mine(tensor):
                continue
            # Devices that share rows sum a weight's gradient by parts only where nothing else reads
            # it, such as a tie. Rows and positions are dims of their own in activations.
            if self._mesh.spec.sequence > 1 and tensor.dim() < 3:
                continue
            if tensor.is_floating_point() and tensor.numel():
                self._latest = tensor
                return


def _widened(shard: Shard, whole: torch.Tensor) -> torch.Tensor:
    with programs.scope(f"zero.parameter/{shard.shown}"):
        return _cast(whole, shard.widened)


def _cast(tensor: torch.Tensor, dtypes: Iterable[torch.dtype]) -> torch.Tensor:
    for dtype in dtypes:
        tensor = _CAST(tensor, dtype=dtype)
    return tensor
