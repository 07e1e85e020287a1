"""Checks of a param group against the config's parameters and the choices of its rule."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from spmdzero.config import Section, check_params
from spmdzero.errors import SpmdZeroConfigError

_AT = "optimizer.params"
# Options of torch's and DeepSpeed's classes that no rule has.
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "max_grad_norm")


def check_group(
    group: Mapping[str, Any], *, parameters: type[Section], fixed: Mapping[str, Any]
) -> None:
    """Checks that a rule can run a param group.

    Args:
        group: a torch param group.
        parameters: the config's model of the optimizer's parameters, which checks the group's.
        fixed: the choices that are part of the compiled update: name -> the rule's choice.

    Raises:
        SpmdZeroConfigError: an option that no rule has, a choice other than the rule's, or a
            hyperparameter that is no number, out of range, or on a device.
    """
    refuse_options(group, _UNSUPPORTED)
    for name, built in fixed.items():
        asked = group.get(name, built)
        if (bool(asked) if isinstance(built, bool) else asked) != built:
            raise SpmdZeroConfigError(
                key=f"{_AT}.{name}",
                value=asked,
                reason=f"the optimizer was built with {name} "
                f"{ {True: 'on', False: 'off'}.get(built, built) }, and this choice is part of the "
                "compiled update",
                fix="Use the same choice in every param group and keep it while training.",
            )
    names = [name for name in parameters.model_fields if name in group]
    check_params(parameters, {name: _on_host(name, group[name]) for name in names}, at=_AT)


def refuse_options(group: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Refuses a group that turns on an option which the update does not have.

    Raises:
        SpmdZeroConfigError: for the first of `names` that is on.
    """
    for name in names:
        if group.get(name, False):
            raise SpmdZeroConfigError(
                key=f"{_AT}.{name}",
                value=group[name],
                reason=f"the sharded update has no {name}",
                fix=f"Leave {name} out or set it to False.",
            )


def refuse_tensors(group: Mapping[str, Any]) -> None:
    """Refuses a group with a tensor that is on a device, or that isn't a single number.

    Raises:
        SpmdZeroConfigError: for the first of them.
    """
    for name, value in group.items():
        _on_host(name, value)


def _on_host(name: str, value: Any) -> Any:
    """The value, with numbers of torch or NumPy as Python's, also inside betas."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            raise SpmdZeroConfigError(
                key=f"{_AT}.{name}",
                value=f"a tensor of shape {list(value.shape)} on {value.device}",
                reason="it would be read back from the device at every step, or is no one number",
                fix=(
                    "Pass a Python float, or a CPU tensor of one element; a new value never "
                    "recompiles."
                ),
            )
        return value.item()
    if name == "betas" and isinstance(value, list | tuple):
        return [_on_host("beta", beta) for beta in value]
    return float(value) if isinstance(value, Real) and not isinstance(value, int) else value
