"""One parameter before and after planning."""

import math
from dataclasses import dataclass

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan._blocks import scale_slot
from spmdzero.plan._dtypes import itemsize
from spmdzero.plan._mesh import MeshSpec
from spmdzero.plan._placement import Placement, Shape
from spmdzero.plan._roles import Role


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """A parameter as the plan sees it.

    Attributes:
        name: its dotted name in the module.
        shape: its global shape.
        dtype: the name of its dtype, e.g. ``"bfloat16"``.
        trainable: whether it has a gradient and optimizer states.
        moments: its own optimizer slots; None if they are the plan's.
        persistent: whether stage 3 keeps it whole between steps because it is small.
        tensor_dim: the dim that the mesh axis ``tensor`` splits; None for none.
        eight_bits: its optimizer slots that rest in codes of 8 bits, with scales beside them.
        shapes: (slot, shape) of the slots of another shape than its own, which are small.
    """

    name: str
    shape: Shape
    dtype: str
    trainable: bool
    moments: tuple[str, ...] | None = None
    persistent: bool = False
    tensor_dim: int | None = None
    eight_bits: tuple[str, ...] = ()
    shapes: tuple[tuple[str, Shape], ...] = ()

    def __post_init__(self) -> None:
        itemsize(self.dtype)
        if any(length < 0 for length in self.shape):
            raise SpmdZeroUsageError(f"{self.name} has a negative length in its shape {self.shape}")


@dataclass(frozen=True, kw_only=True)
class RoleState:
    """Placement and dtype of one role of a tensor; of MOMENT see `ShardingPlan.slot_dtype`."""

    role: Role
    placement: Placement
    dtype: str


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Where every role of one parameter lives.

    Attributes:
        param: the parameter.
        states: one entry per role that this parameter has, in the order of `Role`.
    """

    param: ParamSpec
    states: tuple[RoleState, ...]

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.param.name

    @property
    def shape(self) -> Shape:
        """The parameter's global shape."""
        return self.param.shape

    @property
    def trainable(self) -> bool:
        """Whether the parameter has a gradient and optimizer states."""
        return self.param.trainable

    def elements_of_part(self, mesh: MeshSpec) -> int:
        """Number of elements of what one device of the axis ``tensor`` has of the parameter."""
        split = self.param.tensor_dim is not None
        return math.prod(self.shape) // (mesh.tensor if split else 1)

    def moments(self, usual: tuple[str, ...]) -> tuple[str, ...]:
        """The parameter's optimizer slots; `usual` are the slots of the plan."""
        return usual if self.param.moments is None else self.param.moments

    def slots(self, usual: tuple[str, ...]) -> tuple[str, ...]:
        """The names of all tensors of its optimizer's state: `moments`, and scales of codes."""
        own = self.moments(usual)
        return (*own, *(scale_slot(slot) for slot in own if slot in self.param.eight_bits))

    def placement(self, role: Role) -> Placement | None:
        """Where the tensor of `role` lives, or None if this parameter has no such role."""
        return next((state.placement for state in self.states if state.role is role), None)

    def require(self, role: Role) -> Placement:
        """Where the tensor of `role` lives.

        Raises:
            SpmdZeroUsageError: this parameter has no such role.
        """
        return self._state(role).placement

    def dtype(self, role: Role = Role.PARAMETER) -> str:
        """The dtype of the tensor of `role`.

        Raises:
            SpmdZeroUsageError: this parameter has no such role.
        """
        return self._state(role).dtype

    def _state(self, role: Role) -> RoleState:
        for state in self.states:
            if state.role is role:
                return state
        roles = ", ".join(state.role for state in self.states)
        raise SpmdZeroUsageError(f"{self.name} has no {role}, only: {roles}")
