"""Models when the operations of a schedule run, and which transfers others hide."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spmdzero.explain._chips import Chip
from spmdzero.explain._kernels import kernel_cost
from spmdzero.hlo import Operation

Link = Literal["", "wire", "from host", "to host"]


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The time of one operation in one run of a program, seconds.

    Attributes:
        operation: the operation.
        runs: number of its runs.
        compute: its own time: the compiler's estimate at the chip's clock, or a kernel's model.
        waiting: time of waiting for its own transfer, or for the rest of a transfer that it ends.
        transfer: time of its own transfer, hidden or not.
        link: over what that transfer goes, or the one that it ends; "" if there is none.
        flops: operations of a kernel's matrix products.
    """

    operation: Operation
    runs: int
    compute: float
    waiting: float
    transfer: float
    link: Link
    flops: float


def timeline(schedule: Sequence[Operation], chip: Chip, *, runs: int = 1) -> list[Spent]:
    """The times of the operations of a schedule.

    Operations run one after the other. There is one wire, over which transfers go one after the
    other, at the rate of all links of the chip together: the least time that they can take. So it
    is with each way between the chip and its host's memory, beside the wire and each other. An
    asynchronous transfer goes on while other operations run, until an operation ends it; for any
    other transfer the chip waits. A loop's body is traversed once and counts for each turn.
    """
    return _Clock(chip).run(schedule, runs)


class _Clock:
    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self._now = 0.0
        self._free_from: dict[Link, float] = {}
        self._arrives: dict[str, tuple[Link, float]] = {}

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
        link, transfer = self._transfer(operation)
        began = self._now
        self._now += compute
        if transfer:
            arrives = max(began, self._free_from.get(link, 0.0)) + transfer
            self._free_from[link] = arrives
            if operation.asynchronous:
                self._arrives[operation.name] = link, arrives
            else:
                waiting = max(arrives - self._now, 0.0)
        if operation.ends in self._arrives:
            link, arrives = self._arrives.pop(operation.ends)
            waiting = max(arrives - self._now, 0.0)
        self._now += waiting
        return Spent(
            operation=operation, runs=runs, compute=compute, waiting=waiting, transfer=transfer,
            link=link, flops=flops,
        )  # fmt: skip

    def _transfer(self, operation: Operation) -> tuple[Link, float]:
        """Returns over what an operation's own transfer goes, and its time."""
        if operation.wire_bytes:
            return "wire", operation.wire_bytes / self._chip.ici_rate
        if operation.from_host:
            return "from host", operation.from_host / self._chip.host_rate
        if operation.to_host:
            return "to host", operation.to_host / self._chip.host_rate
        return "", 0.0
