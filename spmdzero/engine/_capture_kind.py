"""Kinds of micro-batch: what is known of each, and how far it can be relied on."""

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import torch

from spmdzero.engine._record import NotCapturableError
from spmdzero.state._training import Training
from spmdzero.step._numbers import fixed_numbers

# Traces that must be equal before one stands for later steps: the first, and two to compare.
TRACES = 3
# Traces in a row that can't stand for later steps, after which no more are looked at.
_FAILURES = 4


class Comparable(Protocol):
    """What a trace came to."""

    def difference(self, other: Any) -> str | None:
        """Why `other` is another step than this one, None if it is the same."""


Traced = TypeVar("Traced", bound=Comparable)


@dataclasses.dataclass(kw_only=True)
class Kind(Generic[Traced]):
    """What the traces of one kind of micro-batch came to.

    Attributes:
        record: the latest, or the first of those that are equal; None where it can't stand for
            others.
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

    def judge(
        self, outcome: Traced | NotCapturableError | None, *, keeps_first: bool = False
    ) -> str | None:
        """Takes note of a trace; returns why it can't stand for others, None if it may.

        Args:
            outcome: of the trace.
            keeps_first: of equal ones the first stays the record, not the latest.
        """
        if isinstance(outcome, NotCapturableError) or outcome is None:
            reason, self.equal, self.record = str(outcome), 0, None
        else:
            known = self.record
            reason = known.difference(outcome) if known is not None else None
            self.equal = self.equal + 1 if reason is None else 1
            if known is None or reason is not None or not keeps_first:
                self.record = outcome
        self.failures = 0 if reason is None else self.failures + 1
        if self.failures == _FAILURES:
            self.given_up = reason
        return reason


def modes(training: Training, parameters: Iterable[torch.Tensor]) -> Hashable:
    """What a trace depends on beside the module's structure and the inputs."""
    device, optimizer = training.device.type, training.optimizer
    return (
        tuple([parameter.requires_grad for parameter in parameters]),
        # The plan is the config's and the batch's.
        training.batch,
        tuple([tuple(map(id, group["params"])) for group in optimizer.param_groups])
        if optimizer
        else None,
        fixed_numbers(optimizer._rules, optimizer.param_groups) if optimizer else None,
        torch.get_default_dtype(),
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
    )
