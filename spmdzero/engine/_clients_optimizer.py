"""The optimizer that was passed to `initialize`: the engine uses its numbers and hooks."""

from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from spmdzero.backend.pure import package_of
from spmdzero.engine._parameter import trained_parameter
from spmdzero.engine._schedule import note_step
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.step._optimizer import ZeroOptimizer

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class _Refusal:
    """Refuses a call of the optimizer passed to `initialize` while an engine trains for it.

    Args:
        client: the optimizer; on any other optimizer, such as the engine's, the hook does nothing.
        call: the call as the message writes it.
        instead: the advice in the message.
    """

    def __init__(self, client: torch.optim.Optimizer, call: str, instead: str) -> None:
        self._client, self._call, self._instead = client, call, instead

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        client = self._client
        if optimizer is not client or not _is_trained(client):
            return
        raise SpmdZeroUsageError(
            f"{type(client).__name__}.{self._call} of the optimizer that was passed to initialize: "
            "its states live sharded in the engine's optimizer, which initialize returned, and "
            f"this one has none. {self._instead}"
        )


def take_over(client: torch.optim.Optimizer, optimizer: ZeroOptimizer) -> None:
    """Makes the hooks of `client` run around the calls of the engine's `optimizer`.

    Calls that would read or make states of `client` raise from now on, while an engine trains for
    it. Its `step` between the engine's backward and step would move the parameters a second time,
    its `state_dict` has no states, and a state that it loads or a group that it adds would reach no
    step. Torch's schedules take `client` as one that has taken a step.
    """
    note_step(client)
    optimizer.given = client
    refused = (
        (client.register_step_pre_hook, "step()", "engine.step()"),
        (client.register_state_dict_pre_hook, "state_dict()", "engine.optimizer.state_dict()"),
        (
            client.register_load_state_dict_pre_hook,
            "load_state_dict(...)",
            "engine.optimizer.load_state_dict(...)",
        ),
    )
    for register, call, instead in refused:
        handle = register(_Refusal(client, call, f"Call {instead}"))
        hooks = handle.hooks_dict_ref()
        assert hooks is not None
        # A refused call must run no hook of the user's.
        hooks.move_to_end(handle.id, last=False)
    for registry in _HOOKS:
        # Both optimizers share one registry, so that hooks may come and go later.
        setattr(optimizer, registry, getattr(client, registry))
    _refuse_groups(client)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a user's hook, on this optimizer or on all, has to run around its step."""
    registries = (
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    hooks = (hook for registry in registries for hook in registry.values())
    return any(package_of(hook) != "spmdzero" for hook in hooks)


def _refuse_groups(client: torch.optim.Optimizer) -> None:
    refusal = _Refusal(
        client,
        "add_param_group(...)",
        "Add all groups before initialize; one that trains later can start with lr=0",
    )

    # Torch has no hook around this call.
    def add_param_group(param_group: dict[str, Any]) -> None:
        refusal(client)
        type(client).add_param_group(client, param_group)

    client.add_param_group = add_param_group  # type: ignore[method-assign]


def _is_trained(optimizer: torch.optim.Optimizer) -> bool:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return any(trained_parameter(parameter) is not None for parameter in parameters)
