"""Waiting for the hosts of a cluster that JAX detects: prints that it waits; Ctrl-C ends it."""

import datetime
import functools
from typing import Any

import jax
from jax._src import distributed

from spmdzero.backend.hosts._roll_call import in_slices
from spmdzero.errors import SpmdZeroRuntimeError

# Seconds added to JAX's own limit, after which it aborts the process.
_LATER = 60


def initialize(*, timeout: datetime.timedelta, **how: Any) -> None:
    """Calls `jax.distributed.initialize`, which detects the cluster.

    After 5 s, and then every 30 s, it says on stderr that it waits.

    Args:
        timeout: for all hosts to come.
        how: further arguments for JAX.

    Raises:
        SpmdZeroRuntimeError: not all hosts have come.
    """
    limit = timeout.total_seconds()

    def late() -> SpmdZeroRuntimeError:
        return SpmdZeroRuntimeError(
            f"{_who()}, and {limit:.0f} s are over (DEEPSPEED_TIMEOUT counts minutes). See whether "
            "the script runs on each host, and whether that address is reached from it"
        )

    call = functools.partial(
        jax.distributed.initialize, initialization_timeout=int(limit) + _LATER, **how
    )
    in_slices(call, name="spmdzero-detected", what=_who, timeout=timeout, late=late)


def _who() -> str:
    found = distributed.global_state
    # JAX stores the address before it asks the cluster for anything, and the rest after that.
    address, count = found.coordinator_address, found.num_processes
    if address is None or count is None:
        return "JAX asks the cluster for its hosts"
    return (
        f"host {found.process_id} of {count} waits for the others at {address}, as JAX has found "
        "them"
    )
