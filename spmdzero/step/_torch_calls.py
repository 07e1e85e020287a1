"""What torch's Optimizer offers, where states are planned shards: what can't be done is refused."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from spmdzero.errors import SpmdZeroUsageError

Saved = TypeVar("Saved")


class PlannedOptimizer(torch.optim.Optimizer):
    """An optimizer whose param groups are those that it was made with.

    Its state dicts are not torch's, so the hooks that torch has around them are called here.
    """

    _planned = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group while the optimizer is made.

        Raises:
            SpmdZeroUsageError: afterwards, when the plan has placed all states.
        """
        if self._planned:
            raise SpmdZeroUsageError(
                "optimizer.add_param_group after initialize: the states of its parameters have no "
                "place in the sharding plan. Pass all groups as model_parameters; one that trains "
                'later can start with "lr": 0'
            )
        super().add_param_group(param_group)

    def _saved_between_hooks(self, save: Callable[[], Any]) -> Any:
        """What `save` returns, or what a hook of `state_dict` makes of it."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = save()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    def _loaded_between_hooks(self, given: Saved, load: Callable[[Saved], None]) -> None:
        """Calls `load` with `given`, or with what a hook of `load_state_dict` makes of a copy."""
        given = copy.copy(given)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed: Any = before(self, given)  # type: ignore[arg-type]
            given = given if changed is None else changed
        load(given)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def refuse_closure(closure: object) -> None:
    """Raises SpmdZeroUsageError for a closure, which a compiled step can't call."""
    if closure is not None:
        raise SpmdZeroUsageError(
            "optimizer.step(closure): the step is one compiled program and calls no closure. Call "
            "engine.backward(loss) and engine.step()"
        )
