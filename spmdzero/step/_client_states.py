"""An optimizer's states as scripts and clients see them, with each parameter's count of updates."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.step._state import State

STEP = "step"
"""Key of the count of updates in a parameter's state, as in torch."""


@dataclasses.dataclass(frozen=True)
class Count:
    """Reads and sets the number of updates that a parameter's state has seen.

    Attributes:
        held: the training state.
        name: the parameter's name.
        reset_at: name of a parameter -> the count of all updates when its state started anew.
    """

    held: State
    name: str
    reset_at: dict[str, int]

    def read(self) -> torch.Tensor:
        """The count, 0-dim fp32 on the CPU; reads one scalar.

        Torch refuses a write into it, which would change no count.
        """
        applied = self.held["counter/applied"].detach().cpu()
        with torch.inference_mode():
            return applied - self.reset_at.get(self.name, 0)

    def write(self, count: Any) -> None:
        """Sets the count for the coming updates of this parameter alone."""
        behind = int(self.held["counter/applied"].item()) - int(count)
        self.reset_at.pop(self.name, None)
        if behind:
            self.reset_at[self.name] = behind


class StatesOfOne(MutableMapping[str, Any]):
    """The states of one parameter: its slots, and the count of updates as ``"step"``.

    Args:
        slots: slot -> tensor on the devices; writes reach it.
        count: the count, None where the rule doesn't use it, or has its own among its slots. A
            client that makes states anew by their type gives none either.
    """

    def __init__(self, slots: MutableMapping[str, Any], count: Count | None = None) -> None:
        self._slots, self._count = slots, count

    def _counted(self, key: object = STEP) -> Count | None:
        """The count, if `key` names it."""
        # Cleared states have no count, as in torch.
        return self._count if key == STEP and self._slots else None

    def __getitem__(self, key: str) -> Any:
        count = self._counted(key)
        return self._slots[key] if count is None else count.read()

    def __setitem__(self, key: str, value: Any) -> None:
        count = self._counted(key)
        if count is None:
            self._slots[key] = value
        else:
            count.write(value)

    def __delitem__(self, key: str) -> None:
        if self._counted(key) is not None:
            raise SpmdZeroUsageError(
                'del optimizer.state[parameter]["step"]: an update needs the count. '
                'optimizer.state[parameter]["step"] = 0 starts it anew, and del '
                "optimizer.state[parameter] all states of the parameter"
            )
        del self._slots[key]

    def __contains__(self, key: object) -> bool:
        # Asked of the mapping's own, it would read the count.
        return key in self._slots or self._counted(key) is not None

    def __iter__(self) -> Iterator[str]:
        if self._counted() is not None:
            yield STEP
        yield from self._slots

    def __len__(self) -> int:
        return len(self._slots) + (self._counted() is not None)

    def clear(self) -> None:
        """Clears all states, which start anew with the next step."""
        self._slots.clear()

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle belongs to no training.
        return dict, (dict(self),)


class States(MutableMapping[torch.Tensor, Any]):
    """Parameter -> its states, as `torch.optim.Optimizer.state` is.

    Args:
        slots: parameter -> its states by slot; writes reach it.
        counts: parameter -> its count, of those whose rule uses it.
    """

    def __init__(
        self,
        slots: defaultdict[torch.Tensor, dict[str, torch.Tensor]],
        counts: Mapping[torch.Tensor, Count],
    ) -> None:
        self._slots, self._counts = slots, counts

    def __getitem__(self, parameter: torch.Tensor) -> StatesOfOne:
        return StatesOfOne(self._slots[parameter], self._counts.get(parameter))

    def __setitem__(self, parameter: torch.Tensor, states: Mapping[str, Any]) -> None:
        given, count = dict(states), self._counts.get(parameter)
        step = None if count is None else given.pop(STEP, None)
        self._slots[parameter] = given
        # Without states the count starts anew, too.
        if count is not None and step is not None and given:
            count.write(step)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._slots[parameter]

    def __contains__(self, parameter: object) -> bool:
        # Asked of the mapping's own, it would make an entry.
        return parameter in self._slots

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def clear(self) -> None:
        """Clears all states, which start anew with the next step."""
        self._slots.clear()

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, {p: dict(states) for p, states in self.items()})
