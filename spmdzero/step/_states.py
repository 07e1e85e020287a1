"""An optimizer's `state` as torch's users treat it: they clear it to start anew."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from spmdzero.optim import UpdateRule
from spmdzero.step._state import State


class LastingState(torch.optim.Optimizer):
    """An optimizer whose `state` is one dict as long as it lives.

    What is assigned to it is put into that dict, by which a captured step finds its tensors.
    """

    _stateful: Collection[torch.Tensor]
    _rules: Sequence[UpdateRule]
    _held: State
    reset_at: dict[str, int]

    def _allocate(self, parameter: nn.Parameter, rule: UpdateRule, group: dict[str, Any]) -> None:
        raise NotImplementedError

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """Parameter -> its states by slot."""
        return self._held.slots

    @state.setter
    def state(self, value: dict[torch.Tensor, Any]) -> None:
        slots = self._held.slots
        if value is not slots:
            slots.clear()
            slots.update(value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        rest = dict(state)
        self.state = rest.pop("state")
        super().__setstate__(rest)

    @torch.no_grad()
    def renew(self) -> None:
        """Makes the states that were cleared, or deleted, as they are at the start.

        The count of updates starts anew too, of one parameter or of all.
        """
        missing = {parameter for parameter in self._stateful if not self.state.get(parameter)}
        if not missing:
            return
        counted = len(missing) < len(self._stateful)
        applied = self._held["counter/applied"]
        now = int(applied.item()) if counted else 0
        if not counted:
            self.reset_at.clear()
            self._held.write("counter/applied", torch.zeros_like(applied))
        for rule, group in zip(self._rules, self.param_groups, strict=True):
            for parameter in group["params"]:
                if parameter in missing:
                    self._allocate(parameter, rule, group)
                    if now and rule.counts:
                        self.reset_at[self._held.names[parameter]] = now
