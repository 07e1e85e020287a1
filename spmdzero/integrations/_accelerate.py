"""What accelerate must know of the other hosts."""

import sys

from spmdzero.errors import SpmdZeroUsageError


def require_counted(hosts: int) -> None:
    """Whether accelerate, where it is in use, counts a process for each host.

    It finds other processes by itself where there is a GPU, and else only when it is asked for
    the CPU (`accelerate/state.py`, `PartialState`).

    Raises:
        SpmdZeroUsageError: it counts others, so that the hosts would read the same rows.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if hosts == 1 or state is None or not state._shared_state:
        return
    counted = state().num_processes
    if counted != hosts:
        raise SpmdZeroUsageError(
            f"accelerate counts {counted} process, and {hosts} hosts train together: each would "
            "read all rows. Start one process per host by `torchrun --nproc_per_node 1`, and write "
            "`from accelerate import PartialState; PartialState(cpu=True)` before you make the "
            "Accelerator. transformers' Trainer undoes that, and trains on one host"
        )
