"""Waiting for the hosts of a cluster that JAX detects: says so, and ends by Ctrl-C."""

import datetime
import functools
from typing import Any

import jax
from jax._src import distributed

from spmdzero.backend.hosts._roll_call import in_slices
from spmdzero.errors import SpmdZeroRuntimeError

# JAX aborts the process where its own limit is over.
_LATER = 60


def initialize(*, timeout: datetime.timedelta, **how: Any) -> None:
    """As `jax.distributed.initialize`, which detects the cluster.

    After 5 s, and then each 30 s, it says on stderr that it waits.

    Args:
        timeout: for all hosts to come.
        how: JAX's.

    Raises:
        SpmdZeroRuntimeError: they haven't.
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
    # JAX writes down the first before it asks the cluster for anything, the others after that.
    address, count = found.coordinator_address, found.num_processes
    if address is None or count is None:
        return "JAX asks the cluster for its hosts"
    return (
        f"host {found.process_id} of {count} waits for the others at {address}, as JAX has found "
        "them"
    )
