"""A job that is started again after a failure, until it ends well or would fail as before."""

import dataclasses
import sys
from collections.abc import Callable, Sequence

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations.launcher._commands import RESTART
from spmdzero.integrations.launcher._job import Command, Failure, Run, run_together

# ssh's own, where it reaches no host.
_UNREACHABLE = 255

Commands = Callable[[Sequence[str], int], list[Command]]
"""What starts some of the hosts, by their names, after so many starts before."""


@dataclasses.dataclass
class _Job:
    """Attributes.

    hosts: those that are left, by name; the job may run on fewer.
    sizes: numbers of hosts on which the batch holds, as far as one has told.
    starts: how often it was started.
    before: the failure before, unless a checkpoint was completed since.
    """

    hosts: list[str]
    sizes: Sequence[int] | None = None
    starts: int = 0
    before: Failure | None = None

    def chosen(self) -> list[str]:
        """The hosts of the next start.

        Raises:
            SpmdZeroUsageError: the batch holds on no number of hosts that is left.
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
    """Runs the job on these hosts, and again after a failure that may pass.

    Args:
        commands: what starts some of the hosts.
        hosts: their names.
        restarts: how often at most.
        elastic: whether it may go on without a host that is gone.
        by_ssh: whether ssh starts the processes, which says by its status what it can't reach.

    Returns 0, 130 after Ctrl-C, or the status of the last failure.

    Raises:
        SpmdZeroUsageError: no number of hosts is left on which the batch holds.
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
    """Why the job isn't started again; nothing where it is."""
    if failure.repeats:
        return f"it would fail again: {failure.error}"
    before = job.before
    if failure.error and before is not None and before.error == failure.error:
        return f"it failed twice in the same way, with no new checkpoint between: {failure.error}"
    if job.starts > restarts:
        return f"it was started again {restarts} times (--restarts {restarts})"
    return ""


def _is_gone(failure: Failure, job: _Job, by_ssh: bool) -> bool:
    """Whether to go on without the host: ssh can't reach it, or it was lost twice in a row."""
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
