"""Runs the hooks of torch's Optimizer around calls that replace torch's own."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from spmdzero.errors import SpmdZeroUsageError

Saved = TypeVar("Saved")


def saved_between_hooks(optimizer: torch.optim.Optimizer, save: Callable[[], Any]) -> Any:
    """The result of `save`, after the hooks of `state_dict`, which may replace it."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    saved = save()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        changed = after(optimizer, saved)
        saved = saved if changed is None else changed
    return saved


def loaded_between_hooks(
    optimizer: torch.optim.Optimizer, given: Saved, load: Callable[[Saved], None]
) -> None:
    """Calls `load` with a copy of `given`, which hooks of `load_state_dict` may replace."""
    given = copy.copy(given)
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed: Any = before(optimizer, given)  # type: ignore[arg-type]
        given = given if changed is None else changed
    load(given)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def refuse_closure(closure: object) -> None:
    """Raises SpmdZeroUsageError for a closure, which a compiled step can't call."""
    if closure is not None:
        raise SpmdZeroUsageError(
            "optimizer.step(closure): the step is one compiled program and calls no closure. Call "
            "engine.backward(loss) and engine.step()"
        )
