"""Models when the operations of a schedule run, and which transfers others hide."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmdzero.explain._chips import Chip
from spmdzero.explain._kernels import kernel_cost
from spmdzero.hlo import Operation


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The time of one operation in one run of a program, seconds.

    Attributes:
        operation: the operation.
        runs: number of its runs.
        compute: its own time: the compiler's estimate at the chip's clock, or a kernel's model.
        waiting: time of waiting for its own transfer, or for the rest of a transfer that it ends.
        transfer: time of its own transfer, hidden or not.
        flops: operations of a kernel's matrix products.
    """

    operation: Operation
    runs: int
    compute: float
    waiting: float
    transfer: float
    flops: float


def timeline(schedule: Sequence[Operation], chip: Chip, *, runs: int = 1) -> list[Spent]:
    """The times of the operations of a schedule.

    Operations run one after the other. There is one wire, over which transfers go one after the
    other, at the rate of all links of the chip together: the least time that they can take. An
    asynchronous transfer goes on while other operations run, until an operation ends it; for any
    other transfer the chip waits. A loop's body is traversed once and counts for each turn.
    """
    return _Clock(chip).run(schedule, runs)


class _Clock:
    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self._now = self._wire_is_free = 0.0
        self._arrives: dict[str, float] = {}

    def run(self, schedule: Sequence[Operation], runs: int) -> list[Spent]:
        found: list[Spent] = []
        for operation in schedule:
            if not operation.bodies:
                found.append(self._one(operation, runs))
            for body in operation.bodies:
                inside = timeline(body, self._chip, runs=runs * operation.trips)
                self._now += sum(s.runs * (s.compute + s.waiting) for s in inside) / max(runs, 1)
                found += inside
        return found

    def _one(self, operation: Operation, runs: int) -> Spent:
        compute, flops, waiting = (operation.cycles or 0) / self._chip.clock, 0.0, 0.0
        if operation.kernel is not None:
            cost = kernel_cost(operation, self._chip)
            compute, flops = cost.seconds, cost.flops
        transfer = operation.wire_bytes / self._chip.ici_rate
        began = self._now
        self._now += compute
        if transfer:
            arrives = max(began, self._wire_is_free) + transfer
            self._wire_is_free = arrives
            if operation.asynchronous:
                self._arrives[operation.name] = arrives
            else:
                waiting = max(arrives - self._now, 0.0)
        if operation.ends in self._arrives:
            waiting = max(self._arrives.pop(operation.ends) - self._now, 0.0)
        self._now += waiting
        return Spent(
            operation=operation, runs=runs, compute=compute, waiting=waiting, transfer=transfer,
            flops=flops,
        )  # fmt: skip
