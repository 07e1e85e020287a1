"""The interface of an update rule: an optimizer's arithmetic, apart from where tensors live."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

from torch import Tensor

from spmdzero.config import Section
from spmdzero.optim._group_checks import check_group


class WholeTensor(Protocol):
    """The whole parameter of a shard, for rules that need more than the shard's elements."""

    @property
    def name(self) -> str:
        """The parameter's name in the model."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's own shape, in whatever form it is stored."""

    def sum(self, stored: Tensor) -> Tensor:
        """The sum over all shards without padding: 0-dim, the same on every device."""

    def gather(self, stored: Tensor) -> Tensor:
        """The whole tensor `[*shape]` of which `stored` is a shard, on every device."""

    def store(self, tensor: Tensor) -> Tensor:
        """The inverse of `gather`: `[*shape]` in the form, and on the devices, of the shards."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A state that a rule keeps for one parameter.

    Attributes:
        name: such as ``"exp_avg"``.
        shape: None for the parameter's; another one's tensor is whole on every device.
        eight_bits: whether it rests in codes of 8 bits, see `optim._eight_bits`.
    """

    name: str
    shape: tuple[int, ...] | None = None
    eight_bits: bool = False


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """The `WholeTensor` of a tensor that is not sharded.

    Attributes:
        shape: the shape of the tensor.
        name: the parameter's name in the model.
    """

    shape: tuple[int, ...]
    name: str = ""

    def sum(self, stored: Tensor) -> Tensor:
        """The sum, 0-dim."""
        return stored.sum()

    def gather(self, stored: Tensor) -> Tensor:
        """`stored` itself, which is whole."""
        return stored

    def store(self, tensor: Tensor) -> Tensor:
        """`tensor` itself, which needs no other form."""
        return tensor


Keep: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def keep_new(new: Tensor, old: Tensor) -> Tensor:
    """Returns `new`, because the step applies."""
    return new


Named: TypeAlias = Mapping[str, Tensor]
Updated: TypeAlias = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of a parameter's update beside its value, gradient and state.

    Attributes:
        factors: the result of `UpdateRule.prepare` for the parameter's group.
        whole: the parameter, of which the value at hand may be a shard.
        keep: chooses between a state's new and old value. If the parameter is computed from the
            result, the program reads the old value once, and the new one takes its memory.
    """

    factors: Named
    whole: WholeTensor
    keep: Keep = keep_new


class UpdateRule(ABC):
    """One optimizer's arithmetic as pure functions over tensors of any placement.

    Rules are elementwise, so that a parameter's shard is updated with the same shard of its
    gradient and state. Whatever else an update needs, it asks of a `WholeTensor`; only that does
    collectives. The hyperparameters of a param group (lr, betas, ...) reach the device as 0-dim
    tensors, so that a new value never means a new graph. Choices that change the graph are fixed at
    construction, and `validate` refuses a group that disagrees.

    One step calls `hyper` per group on the host, `direction` per parameter, the norm and the
    clipping on its results, `prepare` per group on the device, and `update` per parameter.

    Attributes:
        parameters: the config's model of the optimizer's parameters.
        not_in_groups: the parameters that choose a rule and are no hyperparameter of a group.
    """

    parameters: ClassVar[type[Section]]
    not_in_groups: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Names of the state tensors of a parameter, which `update` has in fp32.

        They have the parameter's shape, unless `slots_of` says otherwise.
        """

    def slots_of(self, shape: tuple[int, ...]) -> tuple[Slot, ...]:
        """The state tensors of a parameter of `shape`."""
        return tuple(Slot(name=name) for name in self.slots)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the 0-dim fp32 state tensors of one parameter."""
        return ()

    def initial(self, name: str, group: Mapping[str, Any]) -> float:
        """The initial value of all elements of the slot or scalar `name`."""
        return 0.0

    @property
    def fixed(self) -> dict[str, Any]:
        """The choices in a param group that are part of the graph: name -> this rule's choice."""
        return {}

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of a param group's entries, with the names of torch and DeepSpeed."""
        fields = self.parameters.model_fields.items()
        found = {name: field.default for name, field in fields if name not in self.not_in_groups}
        # A rule with momentum has no default for it, unlike for a switch.
        switches = {name: v for name, v in self.fixed.items() if type(found.get(name)) is type(v)}
        return found | switches

    def validate(self, group: Mapping[str, Any]) -> None:
        """Checks a param group.

        Raises:
            SpmdZeroConfigError: see `check_group`.
        """
        check_group(group, parameters=self.parameters, fixed=self.fixed)

    @abstractmethod
    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """The hyperparameters of one param group for the device, derived in double precision.

        The keys depend only on the rule, never on the values.
        """

    def attributes(self) -> Hashable:
        """Other attributes on which the update's program depends, and which may change."""
        return None

    @property
    def has_direction(self) -> bool:
        """Whether `direction` returns anything but the gradient."""
        return type(self).direction is not UpdateRule.direction

    def direction(self, grad: Tensor, state: Named, hyper: Named, whole: WholeTensor) -> Updated:
        """The tensor that replaces the gradient from here on, and the slots that changed for it.

        It comes before the norm and the clipping, which see its result. The arguments keep their
        values.

        Args:
            grad: fp32, in its stored shape: averaged and unscaled, not yet clipped.
            state: as in `update`.
            hyper: as in `prepare`.
            whole: as in `Terms`.
        """
        return grad, {}

    @property
    def counts(self) -> bool:
        """Whether `prepare` depends on the number of applied steps."""
        return type(self).prepare is not UpdateRule.prepare

    def prepare(self, hyper: Named, step: Tensor) -> dict[str, Tensor]:
        """The factors for `update` of every parameter of one group, once per group and step.

        They are the hyperparameters themselves if no part of the rule depends on the step.

        Args:
            hyper: the results of `hyper` as 0-dim fp32 tensors.
            step: 0-dim fp32, the number of applied steps with this one (1 at first).
        """
        return dict(hyper)

    @abstractmethod
    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """The new parameter and the new state; the arguments keep their values.

        Args:
            param: fp32, any shape: the master weights or a shard of them.
            grad: fp32, the same shape: averaged, unscaled and clipped.
            state: one fp32 tensor per slot, of the same shape or the slot's own, and a 0-dim one
                per scalar.
            terms: the other terms of the step.
        """


def coded_slots(
    names: tuple[str, ...], shape: tuple[int, ...], *, least: int | None
) -> tuple[Slot, ...]:
    """Slots that rest in 8 bits where a parameter has `least` elements or more; None for none."""
    eight_bits = least is not None and math.prod(shape) >= least
    return tuple(Slot(name=name, eight_bits=eight_bits) for name in names)


def decay_rates(group: Mapping[str, Any], *, logarithms: bool = False) -> dict[str, float]:
    """Rates derived from the betas of a param group, by the names that the rules use.

    In double precision: subtracted in fp32, 1 - 0.999 would have only 4 right digits. The
    logarithm of a beta of 0 is minus infinity.
    """
    found = {}
    for name, beta in zip(("beta1", "beta2"), map(float, group["betas"]), strict=True):
        found |= {name: beta, f"one_minus_{name}": 1.0 - beta}
        if logarithms:
            found[f"log_{name}"] = math.log(beta) if beta else -math.inf
    return found
