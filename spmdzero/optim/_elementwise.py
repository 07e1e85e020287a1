"""A torch optimizer of any class whose update is elementwise, run on shards."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.optim._attributes import attributes_of
from spmdzero.optim._group_checks import refuse_options, refuse_tensors
from spmdzero.optim._rule import Named, Terms, Updated, UpdateRule
from spmdzero.optim._stand_in import stand_in


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchElementwise(UpdateRule):
    """Runs a class's own `step` on a shard of a parameter, its gradient and its state.

    Sound for a class that treats each element by itself: make one with `elementwise_rule`, which
    proves it. Each update works on a copy of the optimizer whose one parameter and state stand in
    for the shards. Counters that the class keeps as numbers become 0-dim tensors, so that a
    skipped step doesn't count and no step compiles anew. The numbers of the group stay Python
    numbers, which torch_xla uploads as data; only one that becomes exactly 0 or 1 compiles again.

    Attributes:
        optimizer: the user's; only its class and its attributes are used.
        group: its param group, read at every update.
        slot_values: slot -> what every element of it is at the start.
        scalar_values: scalar -> its value at the start.
        capturable: torch's switch of that name, where the class has it.
    """

    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    slot_values: Mapping[str, float]
    scalar_values: Mapping[str, float]
    capturable: bool

    @property
    def slots(self) -> tuple[str, ...]:
        """The state tensors of the parameter's shape that the class keeps."""
        return tuple(self.slot_values)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The counters and other single numbers that the class keeps for a parameter."""
        return tuple(self.scalar_values)

    def initial(self, name: str, group: Mapping[str, Any]) -> float:
        """What the class starts `name` with, at the lr that it was handed over with."""
        return {**self.slot_values, **self.scalar_values}[name]

    @property
    def defaults(self) -> dict[str, Any]:
        """The class's own."""
        return dict(self.optimizer.defaults)

    def validate(self, group: Mapping[str, Any]) -> None:
        """Check a param group; the ranges are the class's business.

        Raises:
            SpmdZeroConfigError: a tensor among its numbers, or a differentiable step.
        """
        refuse_tensors(group)
        refuse_options(group, ("differentiable",))

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float]:
        """Nothing: the class reads its group itself."""
        return {}

    def attributes(self) -> Hashable:
        """The optimizer's own, which its step may read."""
        return attributes_of(self.optimizer)

    def update(self, param: Tensor, grad: Tensor, state: Named, terms: Terms) -> Updated:
        """One step of one parameter.

        Raises:
            SpmdZeroUsageError: the class keeps other state than when it was proven.
        """
        held: dict[str, Any] = {name: value * 1 for name, value in state.items()}
        copied, parameter = stand_in(
            self.optimizer, self.group, held, param, grad, capturable=self.capturable
        )
        try:
            copied.step()
        except KeyError as error:
            raise self._changed(f"misses {error}") from error
        after = {name: value for name, value in held.items() if value is not None}
        if after.keys() != state.keys():
            raise self._changed(f"keeps {sorted(after)}, not {sorted(state)}")
        new = {name: torch.as_tensor(value, device=param.device) for name, value in after.items()}
        kept = {name: terms.keep(value.to(param.dtype), state[name]) for name, value in new.items()}
        return parameter.detach(), kept

    def _changed(self, how: str) -> SpmdZeroUsageError:
        return SpmdZeroUsageError(
            f"{type(self.optimizer).__name__} now has other state than when it was handed to "
            f"initialize: it {how}. Don't change the kind of a param group while training, such "
            "as momentum from 0"
        )
