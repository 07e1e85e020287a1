"""The optimizer that `initialize` was given: its numbers are the engine's, its states aren't."""

from typing import Any

import torch

from spmdzero.engine._parameter import trained_parameter
from spmdzero.engine._schedule import note_step
from spmdzero.errors import SpmdZeroUsageError


def take_over(client: torch.optim.Optimizer) -> None:
    """Has calls that would read or make states of `client` raise, while an engine trains for it.

    Its `step` between backward and the engine's would move the parameters a second time, its
    `state_dict` is without states, and what it loads would reach no step. To torch's schedules it
    has taken a step.
    """

    def refuse(optimizer: torch.optim.Optimizer, call: str, instead: str) -> None:
        # The copies that run a class's own update have its hooks.
        if optimizer is not client or not _is_trained(client):
            return
        raise SpmdZeroUsageError(
            f"{type(client).__name__}.{call} of the optimizer that was passed to initialize: its "
            "states live sharded in the engine's optimizer, which initialize returned, and this "
            f"one has none. Call {instead}"
        )

    def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        refuse(optimizer, "step()", "engine.step()")

    def state_dict(optimizer: torch.optim.Optimizer) -> None:
        refuse(optimizer, "state_dict()", "engine.optimizer.state_dict()")

    def load_state_dict(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        refuse(optimizer, "load_state_dict(...)", "engine.optimizer.load_state_dict(...)")

    note_step(client)
    client.register_step_pre_hook(step)
    client.register_state_dict_pre_hook(state_dict)
    client.register_load_state_dict_pre_hook(load_state_dict)


def _is_trained(optimizer: torch.optim.Optimizer) -> bool:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return any(trained_parameter(parameter) is not None for parameter in parameters)
