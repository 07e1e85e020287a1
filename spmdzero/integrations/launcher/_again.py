"""Starts a job again after a failure, until it ends well or would fail in the same way."""

import dataclasses
import sys
from collections.abc import Callable, Sequence

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations.launcher._commands import RESTART
from spmdzero.integrations.launcher._job import Command, Failure, Run, run_together

# Exit status of ssh if it can't reach a host.
_UNREACHABLE = 255

Commands = Callable[[Sequence[str], int], list[Command]]
"""Takes names of hosts and the number of earlier starts; returns the hosts' commands."""


@dataclasses.dataclass
class _Job:
    """The state of a job between its starts.

    Attributes:
        hosts: names of the remaining hosts; the job may run on fewer.
        sizes: numbers of hosts on which the batch holds; None until a host has reported them.
        starts: number of starts so far.
        before: the failure before, unless a checkpoint was completed since.
    """

    hosts: list[str]
    sizes: Sequence[int] | None = None
    starts: int = 0
    before: Failure | None = None

    def chosen(self) -> list[str]:
        """The hosts of the next start.

        Raises:
            SpmdZeroUsageError: the batch holds on no possible number of the remaining hosts.
        """
        if self.sizes is None:
            return self.hosts
        count = max((size for size in self.sizes if size <= len(self.hosts)), default=0)
        if not count:
            raise SpmdZeroUsageError(
                f"--elastic: {len(self.hosts)} hosts are left, and the config's batch holds on "
                f"{_numbers(self.sizes)} only. Leave gradient_accumulation_steps out of the "
                "config: it follows from train_batch_size then"
            )
        return self.hosts[:count]


def run_with_restarts(
    commands: Commands, hosts: Sequence[str], *, restarts: int, elastic: bool, by_ssh: bool
) -> int:
    """Runs the job on these hosts, and again after a failure that may be temporary.

    Args:
        commands: makes the commands that start some of the hosts.
        hosts: names of all hosts.
        restarts: largest number of restarts.
        elastic: whether the job may go on without a host that is gone.
        by_ssh: whether ssh starts the processes; its status then tells which host it can't reach.

    Returns 0, 130 after Ctrl-C, or the status of the last failure.

    Raises:
        SpmdZeroUsageError: the batch holds on no possible number of the remaining hosts.
    """
    job = _Job(list(hosts))
    while True:
        chosen = job.chosen()
        run = run_together(commands(chosen, job.starts))
        failure, job.starts = run.failure, job.starts + 1
        if failure is None:
            return run.status
        job.sizes = run.sizes or job.sizes
        if run.saved:
            job.before = None
        final = _final(failure, job, restarts)
        if final:
            if restarts:
                print(f"spmdzero launch: not started again: {final}", file=sys.stderr)
            return run.status
        if elastic and _is_gone(failure, job, by_ssh):
            job.hosts.remove(failure.host)
            if not job.hosts:
                print("spmdzero launch: no host is left", file=sys.stderr)
                return run.status
        job.before = failure
        _say(run, job, restarts)


def _final(failure: Failure, job: _Job, restarts: int) -> str:
    """Why the job isn't started again; an empty string if it is."""
    if failure.repeats:
        return f"it would fail again: {failure.error}"
    before = job.before
    if failure.error and before is not None and before.error == failure.error:
        return f"it failed twice in the same way, with no new checkpoint between: {failure.error}"
    if job.starts > restarts:
        return f"it was started again {restarts} times (--restarts {restarts})"
    return ""


def _is_gone(failure: Failure, job: _Job, by_ssh: bool) -> bool:
    """Whether to drop the host: ssh can't reach it, or it was lost twice in a row."""
    if by_ssh and failure.status == _UNREACHABLE:
        return True
    return not failure.error and job.before is not None and job.before.host == failure.host


def _say(run: Run, job: _Job, restarts: int) -> None:
    chosen = job.chosen()
    from_where = f"the newest checkpoint is {run.saved}" if run.saved else "no new checkpoint"
    print(
        f"spmdzero launch: starts again on {', '.join(chosen)} "
        f"({RESTART}={job.starts}, of at most {restarts}); {from_where}",
        file=sys.stderr,
    )


def _numbers(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
