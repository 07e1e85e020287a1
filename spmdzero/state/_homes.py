"""Places parameters as shards before there is an engine, for `zero.Init`."""

import dataclasses
from typing import Any

import torch
from torch import nn

from spmdzero.backend import Mesh, arrays, runtime
from spmdzero.backend.hosts import processes
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import Layout, ParamSpec, ShardingPlan

_HOME = "_spmdzero_home"


@dataclasses.dataclass(frozen=True)
class Home:
    """The mesh and the layout in which one parameter rests.

    A copy of the parameter on the devices has this home too, a pickled one, on the host, has none.

    Attributes:
        copied: the tensor is a copy, whose memory the compiler has laid out.
    """

    mesh: Mesh
    layout: Layout
    copied: bool = False

    def is_at(self, rest: Layout) -> bool:
        """Whether a tensor that `place` has moved has the shards, mesh and memory of `rest`."""
        own = self.layout
        if own.on_host != rest.on_host:
            return False
        return not self.copied and (own.mesh, own.spec) == (rest.mesh, rest.spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Home":
        return dataclasses.replace(self, copied=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Homes:
    """Chooses homes of parameters that are not planned yet.

    Attributes:
        mesh: the devices.
        least: smallest number of elements of a tensor that is split.
        whole: largest number of elements of a parameter that stays whole, and so on the host.
    """

    mesh: Mesh
    least: int
    whole: int

    def of(self, parameter: nn.Parameter) -> Home | None:
        """The home of a parameter that rests as shards; None if the parameter stays whole."""
        if parameter.device.type == "meta":
            return None
        alone = ParamSpec(
            name="alone",
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            trainable=False,
            persistent=parameter.numel() <= self.whole,
        )
        plan = ShardingPlan.build(
            [alone],
            stage=3,
            mesh=self.mesh.spec,
            min_shard_elements=self.least,
            master=False,
            moments=(),
            accumulator_dtype=None,
            accumulation_steps=1,
        )
        layout = plan.at_rest("parameter/alone")
        return Home(self.mesh, layout) if layout.over_fsdp else None


@torch.no_grad()
def place(parameter: nn.Parameter, home: Home) -> bool:
    """Moves a parameter from the host to its shards; it stays the same Python object.

    All of several hosts take the first one's value, as DeepSpeed's `Init` broadcasts it.

    Returns False, without any change, if a weak reference to the parameter forbids the move.
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

    Returns its home, or None if `place` has not moved it or an engine has taken it over.

    Raises:
        SpmdZeroUsageError: there is a weak reference to the parameter.
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
    """The home of a tensor that `place` has moved and no engine has taken over, else None."""
    return vars(tensor).get(_HOME)


def left_home(tensor: torch.Tensor) -> Home | None:
    """Returns what `home_of` does, and forgets the home, as an engine takes the tensor over."""
    return vars(tensor).pop(_HOME, None)


class HeldError(RuntimeError):
    """A graph of autograd holds the tensor."""


def exchange(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Swaps the contents of two tensor objects; returns False if weak references forbid it.

    Raises:
        HeldError: something that was computed of `tensor` is still there.
    """
    try:
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError as error:
        if "use_count" in str(error):
            raise HeldError(str(error)) from error
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
