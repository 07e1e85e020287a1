"""Kinds of micro-batch: how they differ, and how far the traces of a kind can be trusted."""

import contextlib
import dataclasses
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch

from spmdzero.backend import current
from spmdzero.backend.pure import ImpureError
from spmdzero.config import BatchSizes
from spmdzero.state._training import Training
from spmdzero.step._numbers import fixed_numbers

# Number of traces that must be equal before one is used for later steps.
TRACES = 3
# Number of unusable traces in a row after which a kind gets no more comparisons.
_FAILURES = 4


class NotCapturableError(ImpureError):
    """Says why a trace can't be used for later steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Everything that a compiled program depends on, except the watched structure of the module.

    Attributes:
        form: form of the inputs, see `InputForm`.
        requires_grad: `requires_grad` of each parameter.
        batch: the batch sizes, which with the config decide the plan.
        groups: the ids of the parameters of each param group.
        numbers: the numbers of the groups that are constants of the program.
        reset_at: the counts of updates that parameters' own counts start from, constants too.
        default: torch's default dtype.
        autocast: dtype of `torch.autocast` on the devices, None if it is off.
    """

    form: Hashable
    requires_grad: tuple[bool, ...]
    batch: BatchSizes
    groups: Hashable
    numbers: Hashable
    reset_at: Hashable
    default: torch.dtype
    autocast: torch.dtype | None

    @classmethod
    def of(
        cls,
        training: Training,
        *,
        form: Hashable,
        parameters: Iterable[torch.Tensor],
    ) -> "Kind":
        """The kind of the micro-batch or forward that `training` is about to run."""
        optimizer = training.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        # A subclass of torch's tensors would run Python for each parameter, at each step.
        with torch._C.DisableTorchFunctionSubclass():
            trained = tuple([parameter.requires_grad for parameter in parameters])
        return cls(
            form=form,
            requires_grad=trained,
            batch=training.batch,
            groups=tuple([tuple(map(id, group["params"])) for group in groups]),
            numbers=fixed_numbers(optimizer._rules, groups) if optimizer is not None else None,
            reset_at=tuple(optimizer.reset_at.items()) if optimizer is not None else None,
            default=torch.get_default_dtype(),
            autocast=autocast_dtype(),
        )


def autocast_dtype() -> torch.dtype | None:
    """The dtype of `torch.autocast` on the devices, None if it is off."""
    devices = current().device_type
    return torch.get_autocast_dtype(devices) if torch.is_autocast_enabled(devices) else None


class Comparable(Protocol):
    """The result of a trace, which can be compared with another result."""

    def difference(self, other: Any) -> str | None:
        """How `other` differs from this result, or None if they are the same."""


Traced = TypeVar("Traced", bound=Comparable)


@dataclasses.dataclass(kw_only=True)
class Trust(Generic[Traced]):
    """The results of comparing the traces of one kind.

    Attributes:
        record: the first of the equal traces; None if the latest trace can't be used.
        equal: number of traces in a row that were the same.
        failures: number of traces in a row that were not.
        given_up: why no more traces are compared, or None.
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
        """Makes the next micro-batch be traced once more, and compared."""
        self.equal = min(self.equal, TRACES - 1)

    def forgive(self) -> None:
        """Takes back the latest failure: the plain run raised too, so the error is the user's."""
        if self.failures < _FAILURES:
            self.failures = max(0, self.failures - 1)

    def judge(self, outcome: Traced | ImpureError) -> str | None:
        """Takes note of a trace; returns why it can't be used for others, or None."""
        if isinstance(outcome, ImpureError):
            reason, self.equal, self.record = str(outcome), 0, None
        else:
            known = self.record
            reason = known.difference(outcome) if known is not None else None
            self.equal = self.equal + 1 if reason is None else 1
            # Each record has constants of its own, and two records in one step would need a
            # different program.
            if known is None or reason is not None:
                self.record = outcome
        self.failures = 0 if reason is None else self.failures + 1
        if self.failures == _FAILURES:
            self.given_up = reason
        return reason


@contextlib.contextmanager
def errors_are_the_users(trust: Trust[Any] | None) -> Iterator[None]:
    """Surrounds a plain run after a failed trace: an error raised inside it is the user's."""
    try:
        yield
    except BaseException:
        if trust is not None:
            trust.forgive()
        raise
