"""Kinds of micro-batch: what tells them apart, and how far the traces of one can be relied on."""

import contextlib
import dataclasses
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch

from spmdzero.backend import current
from spmdzero.config import BatchSizes
from spmdzero.state._training import Training
from spmdzero.step._numbers import fixed_numbers

# Traces that must be equal before one stands for later steps: the first, and two to compare.
TRACES = 3
# Traces in a row that can't stand for later steps, after which no more are looked at.
_FAILURES = 4


class NotCapturableError(Exception):
    """Why a trace can't stand for later steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What a compiled program depends on beside the module's structure, which is watched.

    Attributes:
        part: of the step: a forward, or a micro-batch that ends the step or doesn't.
        form: of the inputs, see `InputForm`.
        requires_grad: of each parameter.
        batch: the plan is the config's and the batch's.
        groups: the ids of the parameters of each param group.
        numbers: those of the groups that are constants of the program.
        default: torch's default dtype.
        autocast: dtype of `torch.autocast` on the devices, None where it is off.
    """

    part: Hashable
    form: Hashable
    requires_grad: tuple[bool, ...]
    batch: BatchSizes
    groups: Hashable
    numbers: Hashable
    default: torch.dtype
    autocast: torch.dtype | None

    @classmethod
    def of(
        cls,
        training: Training,
        *,
        part: Hashable,
        form: Hashable,
        parameters: Iterable[torch.Tensor],
    ) -> "Kind":
        """The kind of what `training` is about to run."""
        optimizer = training.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        return cls(
            part=part,
            form=form,
            requires_grad=tuple([parameter.requires_grad for parameter in parameters]),
            batch=training.batch,
            groups=tuple([tuple(map(id, group["params"])) for group in groups]),
            numbers=fixed_numbers(optimizer._rules, groups) if optimizer is not None else None,
            default=torch.get_default_dtype(),
            autocast=autocast_dtype(),
        )


def autocast_dtype() -> torch.dtype | None:
    """The dtype of `torch.autocast` on the devices, None where it is off."""
    devices = current().device_type
    return torch.get_autocast_dtype(devices) if torch.is_autocast_enabled(devices) else None


class Comparable(Protocol):
    """What a trace came to."""

    def difference(self, other: Any) -> str | None:
        """Why `other` is another step than this one, None if it is the same."""


Traced = TypeVar("Traced", bound=Comparable)


@dataclasses.dataclass(kw_only=True)
class Trust(Generic[Traced]):
    """What the traces of one kind came to.

    Attributes:
        record: the first of those that are equal; None where the latest can't stand for others.
        equal: how many traces in a row were the same.
        failures: how many in a row were not.
        given_up: why no more are looked at.
    """

    record: Traced | None = None
    equal: int = 0
    failures: int = 0
    given_up: str | None = None

    @property
    def ready(self) -> bool:
        """Whether later micro-batches need no trace."""
        return self.equal >= TRACES

    def recheck(self) -> None:
        """Has the next micro-batch traced once more, and compared."""
        self.equal = min(self.equal, TRACES - 1)

    def forgive(self) -> None:
        """What was traced instead of the latest failure raised too: an error of the user's."""
        if self.failures < _FAILURES:
            self.failures = max(0, self.failures - 1)

    def judge(self, outcome: Traced | NotCapturableError) -> str | None:
        """Takes note of a trace; returns why it can't stand for others, None if it may."""
        if isinstance(outcome, NotCapturableError):
            reason, self.equal, self.record = str(outcome), 0, None
        else:
            known = self.record
            reason = known.difference(outcome) if known is not None else None
            self.equal = self.equal + 1 if reason is None else 1
            # Each has constants of its own, and two records in one step would make it another
            # program.
            if known is None or reason is not None:
                self.record = outcome
        self.failures = 0 if reason is None else self.failures + 1
        if self.failures == _FAILURES:
            self.given_up = reason
        return reason


@contextlib.contextmanager
def errors_are_the_users(trust: Trust[Any] | None) -> Iterator[None]:
    """Around what is traced for want of a record: who raises here raised in the trace before."""
    try:
        yield
    except BaseException:
        if trust is not None:
            trust.forgive()
        raise
