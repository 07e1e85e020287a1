"""The initial state of a torch optimizer's class, found by watching its first step."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from spmdzero.errors import SpmdZeroConfigError
from spmdzero.optim._substituted import stand_in

Values = dict[str, float]


class _FirstValues(dict[str, Any]):
    """A state that remembers the first value of every name, before the step changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self.writes: Counter[str] = Counter()

    def __setitem__(self, name: str, value: Any) -> None:
        self.writes[name] += 1
        if name not in self.first and value is not None:
            self.first[name] = value.clone() if isinstance(value, Tensor) else value
        super().__setitem__(name, value)

    def setdefault(self, name: str, value: Any = None) -> Any:
        if name not in self:
            self[name] = value
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


def initial_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> tuple[Values, Values]:
    """The initial value of each slot of the parameter's shape, and of each single number.

    Raises:
        SpmdZeroConfigError: the class keeps state of another shape, or state whose elements
            start with different values.
    """
    generator = torch.Generator().manual_seed(1)
    param, grad = torch.randn(2, 6, 4, generator=generator, dtype=torch.float32)
    state = _FirstValues()
    copied, parameter = stand_in(optimizer, group, state, param, grad)
    copied.step()
    if copied.state[parameter] is not state:
        refuse(optimizer, "it replaces its state as a whole, where it should change entries")
    slots: Values = {}
    scalars: Values = {}
    for name, value in state.first.items():
        if isinstance(value, Tensor) and value.shape == param.shape and value.dim():
            if value.dtype != torch.float32 or not bool((value == value.flatten()[0]).all()):
                refuse(
                    optimizer,
                    f"its state {name!r} does not start from one fp32 value",
                    fix=f"Start {name!r} from torch.zeros_like(parameter), say.",
                )
            slots[name] = float(value.flatten()[0])
        elif _is_single_number(value):
            # A 1 that is written once is the result of `state.get(name, 0) + 1`, which has counted.
            counted = not isinstance(value, Tensor) and value == 1 and state.writes[name] == 1
            scalars[name] = 0.0 if counted else float(value)
        else:
            kind = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            refuse(optimizer, f"its state {name!r} of a [6, 4] parameter is {kind}")
    return slots, scalars


def _is_single_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def refuse(optimizer: torch.optim.Optimizer, reason: str, *, fix: str | None = None) -> NoReturn:
    """Raises SpmdZeroConfigError for the class of `optimizer`."""
    cls = type(optimizer)
    raise SpmdZeroConfigError(
        key="optimizer",
        value=f"{cls.__module__}.{cls.__qualname__}",
        reason=f"its update can't run on shards: {reason}",
        fix=fix
        or "Use torch.optim.AdamW, SGD or Adagrad, a name of the config, or a class that treats "
        "each element of a parameter by itself.",
    )
