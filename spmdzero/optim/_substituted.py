"""A user's torch optimizer, run over other tensors than its own."""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]

PUT_ON = ("step", "add_param_group")
"""Methods that a schedule and an engine put on an optimizer, bound to that optimizer."""


def stand_in(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    state: State,
    param: Tensor,
    grad: Tensor,
    *,
    capturable: bool = False,
) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """A copy of `optimizer` with one param group of one parameter, ready to `step`.

    Args:
        optimizer: gives its class and attributes, and is left alone.
        group: the hyperparameters of the copy's param group.
        state: the copy's state of the parameter, which its step changes in place.
        param, grad: are copied.
        capturable: torch's switch for counters as tensors on the device, where the class has it.
    """
    # A product, unlike clone(), keeps in-place updates from the shard that it stands in for.
    parameter = nn.Parameter(param * 1)
    parameter.grad = grad * 1
    copied = object.__new__(type(optimizer))
    copied.__dict__.update(vars(optimizer))
    # Hooks belong to the engine's step, of which this is a part.
    copied._optimizer_step_pre_hooks = OrderedDict()
    copied._optimizer_step_post_hooks = OrderedDict()
    for bound in PUT_ON:
        copied.__dict__.pop(bound, None)
    # Turn off torch's implementations for several tensors at a time.
    wanted = {"foreach": False, "fused": False, "capturable": capturable}
    switches = {name: value for name, value in wanted.items() if name in group}
    copied.param_groups = [{**group, **switches, "params": [parameter]}]
    # Give the copy its own dict: `__dict__.update` took the user's.
    copied.state = defaultdict(dict)
    copied.state[parameter] = state
    return copied, parameter
