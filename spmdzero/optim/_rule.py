"""What an update rule is: the arithmetic of one optimizer, apart from where tensors live."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

from torch import Tensor

from spmdzero.config import Section
from spmdzero.optim._group_checks import check_group


class WholeTensor(Protocol):
    """One parameter beyond the shard at hand, for rules that need more than their own elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's own shape, whatever the form it is stored in."""

    def sum(self, stored: Tensor) -> Tensor:
        """The total over all shards, padding left out: 0-dim, the same on every device."""

    def gather(self, stored: Tensor) -> Tensor:
        """The tensor `[*shape]` that `stored` holds, on every device, in `stored`'s dtype."""

    def store(self, tensor: Tensor) -> Tensor:
        """What `gather` undoes: `[*shape]` in the form, and on the devices, of the shards."""


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """The `WholeTensor` of a tensor that is whole where it is.

    Attributes:
        shape: its shape.
    """

    shape: tuple[int, ...]

    def sum(self, stored: Tensor) -> Tensor:
        """The total, 0-dim."""
        return stored.sum()

    def gather(self, stored: Tensor) -> Tensor:
        """`stored`, which is whole."""
        return stored

    def store(self, tensor: Tensor) -> Tensor:
        """`tensor`, which needs no other form."""
        return tensor


Keep: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def keep_new(new: Tensor, old: Tensor) -> Tensor:
    """`new`: the step applies."""
    return new


Named: TypeAlias = Mapping[str, Tensor]
Updated: TypeAlias = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the update of a parameter depends on beside its value, gradient and state.

    Attributes:
        factors: what `UpdateRule.prepare` returned for the parameter's group.
        whole: the parameter, of which the value at hand may be a shard.
        keep: of a state's new and old value the one to go on with. Where the parameter follows from
            what `keep` returned, the program reads the old value once, and the new one takes its
            place.
    """

    factors: Named
    whole: WholeTensor
    keep: Keep = keep_new


class UpdateRule(ABC):
    """One optimizer's arithmetic as pure functions over tensors of any placement.

    Elementwise, so that a parameter's shard is updated with the same shard of its gradient and
    state: what else an update needs, it asks a `WholeTensor` for, and collectives come from there
    only. Numbers of a param group (lr, betas, ...) reach the device as 0-dim tensors, so that a new
    value never means a new graph. What would change the graph is fixed at construction, and
    `validate` refuses a group that disagrees.

    One step: `hyper` per group on the host, `direction` per parameter, the norm and the clipping
    of what came out, `prepare` per group on the device, `update` per parameter.

    Attributes:
        parameters: the config's model of the optimizer's parameters.
        not_in_groups: those of them that choose a rule rather than a number of a param group.
    """

    parameters: ClassVar[type[Section]]
    not_in_groups: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Names of the state tensors of one parameter: its shape, fp32."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the 0-dim fp32 state tensors of one parameter."""
        return ()

    def initial(self, name: str, group: Mapping[str, Any]) -> float:
        """What every element of the slot or scalar `name` is at the start."""
        return 0.0

    @property
    def fixed(self) -> dict[str, Any]:
        """What of a param group is part of the graph: name -> what this rule was built for."""
        return {}

    @property
    def defaults(self) -> dict[str, Any]:
        """What a param group holds where the user said nothing, as torch and DeepSpeed name it."""
        fields = self.parameters.model_fields.items()
        found = {name: field.default for name, field in fields if name not in self.not_in_groups}
        # A momentum that is fixed to be some has no default, unlike a switch.
        switches = {name: v for name, v in self.fixed.items() if type(found.get(name)) is type(v)}
        return found | switches

    def validate(self, group: Mapping[str, Any]) -> None:
        """Check a param group.

        Raises:
            SpmdZeroConfigError: see `check_group`.
        """
        check_group(group, parameters=self.parameters, fixed=self.fixed)

    @abstractmethod
    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """The numbers of one param group for the device, derived in double precision.

        The keys depend on the rule only, never on the values.
        """

    def attributes(self) -> Hashable:
        """What else the program of an update depends on and may change between steps."""
        return None

    @property
    def has_direction(self) -> bool:
        """Whether `direction` returns anything but the gradient."""
        return type(self).direction is not UpdateRule.direction

    def direction(self, grad: Tensor, state: Named, hyper: Named, whole: WholeTensor) -> Updated:
        """What takes the gradient's place from here on, and the slots that changed for it.

        Before the norm and the clipping, which see what this returns. The arguments keep their
        values.

        Args:
            grad: fp32, in its stored shape: averaged and unscaled, not yet clipped.
            state: as `update`.
            hyper: as `prepare`.
            whole: as `Terms`.
        """
        return grad, {}

    @property
    def counts(self) -> bool:
        """Whether `prepare` depends on how many steps have been applied."""
        return type(self).prepare is not UpdateRule.prepare

    def prepare(self, hyper: Named, step: Tensor) -> dict[str, Tensor]:
        """What every parameter of one group needs in `update`, once per group and step.

        The numbers as they are, where no part of the rule depends on the step.

        Args:
            hyper: the numbers of `hyper` as 0-dim fp32 tensors.
            step: 0-dim fp32, how many steps have been applied, this one included (1 at first).
        """
        return dict(hyper)

    @abstractmethod
    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """The new parameter and the new state; the arguments keep their values.

        Args:
            param: fp32, any shape: the master weights or a shard of them.
            grad: fp32, the same shape: averaged, unscaled and clipped.
            state: one fp32 tensor of the same shape per slot, a 0-dim one per scalar.
            terms: what else the step is made of.
        """


def decay_rates(group: Mapping[str, Any], *, logarithms: bool = False) -> dict[str, float]:
    """What the betas of a param group lead to, by the names that the rules know them by.

    In double precision: subtracted in fp32, 1 - 0.999 would be right to 4 digits only. The
    logarithm of a beta of 0 is minus infinity.
    """
    found = {}
    for name, beta in zip(("beta1", "beta2"), map(float, group["betas"]), strict=True):
        found |= {name: beta, f"one_minus_{name}": 1.0 - beta}
        if logarithms:
            found[f"log_{name}"] = math.log(beta) if beta else -math.inf
    return found
