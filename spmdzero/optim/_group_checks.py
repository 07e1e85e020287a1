"""Checks that every rule makes on a param group."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from spmdzero.errors import SpmdZeroConfigError


def require_number(
    name: str, value: object, *, low: float | None = 0.0, below: float | None = None
) -> None:
    """Refuse what is no number, nor a CPU tensor that holds one, or lies outside [low, below).

    Raises:
        SpmdZeroConfigError: names the param group key, the value and the range.
    """
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.ndim != 0:
            raise SpmdZeroConfigError(
                key=_key(name),
                value=f"a tensor of shape {list(value.shape)} on {value.device}",
                reason="it would be read back from the device at every step, or is no one number",
                fix="Pass a Python float, or a 0-dim CPU tensor; a new value never recompiles.",
            )
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SpmdZeroConfigError(
            key=_key(name),
            value=value,
            reason=f"a number is needed, this is {type(value).__name__}",
            fix=f"Write {name} as a number, without quotes.",
        )
    number = float(value)
    too_low = low is not None and not number >= low
    too_high = below is not None and not number < below
    if too_low or too_high:
        wanted = f"at least {low:g}" + ("" if below is None else f" and less than {below:g}")
        raise SpmdZeroConfigError(
            key=_key(name),
            value=value,
            reason="the value is out of range",
            fix=f"Use a number that is {wanted}.",
        )


def require_betas(betas: object) -> None:
    """Refuse what is not two decay rates from 0 and below 1.

    Raises:
        SpmdZeroConfigError: names the value and the range.
    """
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise SpmdZeroConfigError(
            key=_key("betas"),
            value=betas,
            reason="two decay rates are needed",
            fix="Give two numbers, such as [0.9, 0.999].",
        )
    for beta in betas:
        require_number("betas", beta, below=1.0)


def log_decay(beta: float) -> float:
    """The logarithm of a decay rate, minus infinity for 0."""
    return math.log(beta) if beta else -math.inf


def require_fixed(group: Mapping[str, Any], name: str, *, fixed: bool) -> None:
    """Refuse a group whose switch `name`, where it has one, differs from the rule's.

    Raises:
        SpmdZeroConfigError: the group asks for another graph.
    """
    if name in group and bool(group[name]) != fixed:
        raise SpmdZeroConfigError(
            key=_key(name),
            value=group[name],
            reason=f"the optimizer was built with {name} {'on' if fixed else 'off'}, and this "
            "choice is part of the compiled update",
            fix="Use the same choice in every param group and keep it while training.",
        )


def refuse_tensors(group: Mapping[str, Any]) -> None:
    """Refuse a group with a tensor among its numbers.

    Raises:
        SpmdZeroConfigError: for the first of them.
    """
    for name, value in group.items():
        if isinstance(value, Tensor):
            require_number(name, value)


def refuse_options(group: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Refuse a group that switches on an option that the update does not have.

    Raises:
        SpmdZeroConfigError: for the first of `names` that is on.
    """
    for name in names:
        if group.get(name, False):
            raise SpmdZeroConfigError(
                key=_key(name),
                value=group[name],
                reason=f"the sharded update has no {name}",
                fix=f"Leave {name} out or set it to False.",
            )


def _key(name: str) -> str:
    return f"optimizer.params.{name}"
