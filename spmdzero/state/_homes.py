"""Parameters that rest as shards before an engine has them, as `zero.Init` places them."""

import dataclasses

import torch
from torch import nn

from spmdzero.backend import Mesh, arrays, runtime
from spmdzero.backend.hosts import processes
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import Layout, choose_placement

_HOME = "_spmdzero_home"


@dataclasses.dataclass(frozen=True)
class Home:
    """Where one parameter rests: in which shards, of which mesh."""

    mesh: Mesh
    layout: Layout

    def is_at(self, rest: Layout | None) -> bool:
        """Whether that is where `rest` says, in the same shards of the same mesh."""
        own = self.layout
        return rest is not None and (own.mesh, own.spec) == (rest.mesh, rest.spec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Homes:
    """Where parameters are to rest that nobody has planned yet.

    Attributes:
        mesh: the devices.
        least: elements from which on a tensor is split.
        whole: a parameter of at most so many elements stays whole, and so on the host.
    """

    mesh: Mesh
    least: int
    whole: int

    def of(self, parameter: nn.Parameter) -> Home | None:
        """Where a parameter of this shape rests as shards; None where it stays whole."""
        if parameter.numel() <= self.whole or parameter.device.type == "meta":
            return None
        shape, spec = tuple(parameter.shape), self.mesh.spec
        placement = choose_placement(shape, mesh=spec, min_shard_elements=self.least)
        if placement.kind != "shard":
            return None
        return Home(self.mesh, Layout(placement=placement, shape=shape, mesh=spec))


@torch.no_grad()
def place(parameter: nn.Parameter, home: Home) -> bool:
    """Moves a parameter from the host to its shards; every Python object of it stays.

    Of several hosts it is the first one's value, as DeepSpeed's `Init` broadcasts it.

    Returns False, having done nothing, where a weak reference to the parameter forbids it.
    """
    value = parameter.detach()
    if runtime.process_count() > 1 and value.numel():
        value = value.contiguous()
        processes.broadcast(value.reshape(-1).view(torch.uint8))
    spec = home.layout.spec
    return _become(parameter, home.mesh.place_part(value, spec), {_HOME: home})


@torch.no_grad()
def bring(parameter: nn.Parameter) -> Home | None:
    """Brings a parameter that `place` has moved back to the host, whole.

    Returns where it was, None if it is none of those: an engine's, for example.

    Raises:
        SpmdZeroUsageError: something keeps a weak reference to it.
    """
    home = home_of(parameter)
    if home is None or not arrays.is_mine(parameter):
        return None
    if not _become(parameter, arrays.read(parameter.detach()), {}):
        raise SpmdZeroUsageError(
            f"a parameter {list(parameter.shape)} that zero.Init has placed can't come to the "
            "host: something keeps a weak reference to it. Make the reference after the model is "
            "initialised, or build that module outside of zero.Init"
        )
    return home


def home_of(tensor: torch.Tensor) -> Home | None:
    """Where `place` has put a tensor that no engine has taken over; None for any other."""
    return vars(tensor).get(_HOME)


def left_home(tensor: torch.Tensor) -> Home | None:
    """The same, once: an engine takes it over."""
    return vars(tensor).pop(_HOME, None)


def exchange(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Makes the object `tensor` what `other` is; False where weak references forbid it."""
    try:
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError as error:
        if "weakref" not in str(error):
            raise
        return False
    return True


def _become(parameter: nn.Parameter, value: torch.Tensor, more: dict[str, Home]) -> bool:
    other = nn.Parameter(value, requires_grad=parameter.requires_grad)
    own = arrays.attributes(parameter)
    own.pop(_HOME, None)
    vars(other).update(own | more)
    return exchange(parameter, other)
