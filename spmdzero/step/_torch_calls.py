"""What torch's Optimizer offers and one whose states are planned shards can't do."""

from typing import Any

import torch

from spmdzero.errors import SpmdZeroUsageError


class PlannedOptimizer(torch.optim.Optimizer):
    """An optimizer whose param groups are those that it was made with."""

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


def refuse_closure(closure: object) -> None:
    """Raises SpmdZeroUsageError for a closure, which a compiled step can't call."""
    if closure is not None:
        raise SpmdZeroUsageError(
            "optimizer.step(closure): the step is one compiled program and calls no closure. Call "
            "engine.backward(loss) and engine.step()"
        )
