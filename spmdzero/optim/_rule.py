"""What an update rule is: the arithmetic of one optimizer, apart from where tensors live."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor


class UpdateRule(ABC):
    """One optimizer's arithmetic as pure, elementwise functions over tensors of any placement.

    Elementwise, so a parameter's shard is updated with the same shard of its gradient and state
    and nothing else: no collective can come from here. Numbers of a param group (lr, betas, ...)
    reach the device as 0-dim tensors, so that a new value never means a new graph. What would
    change the graph is fixed at construction, and `validate` refuses a group that disagrees.

    One step: `hyper` per group on the host, `prepare` per group on the device, `update` per
    parameter.
    """

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Names of the state tensors of one parameter: its shape, fp32, zero at the start."""

    @property
    @abstractmethod
    def defaults(self) -> dict[str, Any]:
        """What a param group holds where the user said nothing, as torch and DeepSpeed name it."""

    @abstractmethod
    def validate(self, group: Mapping[str, Any]) -> None:
        """Check a param group.

        Raises:
            SpmdZeroConfigError: a number is out of range or not a Python number, or the group
                asks for another graph than the one this rule was built for.
        """

    @abstractmethod
    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """The numbers of one param group for the device, derived in double precision.

        The keys depend on the rule only, never on the values.
        """

    @abstractmethod
    def prepare(self, hyper: Mapping[str, Tensor], step: Tensor) -> dict[str, Tensor]:
        """What every parameter of one group needs in `update`, once per group and step.

        Args:
            hyper: the numbers of `hyper` as 0-dim fp32 tensors.
            step: 0-dim fp32, how many steps have been applied, this one included (1 at first).
        """

    @abstractmethod
    def update(
        self,
        param: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor],
        factors: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The new parameter and the new state; the arguments keep their values.

        Args:
            param: fp32, any shape: the master weights or a shard of them.
            grad: fp32, the same shape: averaged, unscaled and clipped.
            state: one fp32 tensor of the same shape per slot.
            factors: what `prepare` returned for the parameter's group.
        """
