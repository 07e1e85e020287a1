"""Connecting processes, by the variables of their launcher or by a cluster that JAX detects."""

import atexit
import ctypes
import datetime
import functools
import os
import signal
import sys
import warnings
from typing import Any

import jax
import numpy as np
import torch.distributed as dist
from jax._src import distributed
from jax.experimental import multihost_utils

from spmdzero.backend.hosts._launched import (
    TIMEOUT,
    free_port,
    is_launched,
    join_launched,
    own_host,
)
from spmdzero.backend.hosts._roll_call import in_slices
from spmdzero.backend.hosts._watching import begin, watch
from spmdzero.errors import SpmdZeroRuntimeError

# After so many seconds without another's heartbeat JAX ends a process, with no word of ours.
_HEARTBEATS = 24 * 3600
# Seconds added to JAX's own limit, after which it aborts the process.
_LATER = 60
_LONGEST_ADDRESS = 256


@atexit.register
def _past_the_barrier() -> None:
    """Avoids JAX's barrier at the end of a failed process: the others wait for this process."""
    watched = watch()
    if watched is None:
        return
    # Python's lock is gone: an aborting thread that asks for it would be ended, and abort again.
    ctypes.CDLL(None).signal(signal.SIGABRT, None)
    if watched.failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _before_abort(_: int) -> None:
    watched = watch()
    if watched is not None:
        watched.await_verdict()


# ctypes keeps no reference to the callback.
_BEFORE_ABORT = ctypes.CFUNCTYPE(None, ctypes.c_int)(_before_abort)


def _say_why_before_an_abort() -> None:
    """Installs a handler of SIGABRT that waits for the watch's verdict.

    Where the first process dies, JAX's client aborts the others at once, from its own thread. No
    exception is raised, and Python runs handlers of signals in the main thread, which may wait for
    the devices. So this is a handler of C, which the aborting thread calls.
    """
    ctypes.CDLL(None).signal(signal.SIGABRT, _BEFORE_ABORT)


def connect() -> None:
    """Connects the devices of all processes, unless they are connected, or this one is alone.

    Raises:
        SpmdZeroRuntimeError: JAX's devices were used before.
    """
    if jax.distributed.is_initialized():
        return
    if join_launched():
        begin()
        _initialize(
            has_peers=True,
            coordinator_address=_agreed_address(),
            num_processes=dist.get_world_size(),
            process_id=dist.get_rank(),
            local_device_ids=[],
        )
    elif not is_launched():
        with warnings.catch_warnings():
            # The warning names Kubernetes even where a single pod runs a notebook.
            warnings.simplefilter("ignore", UserWarning)
            try:
                # One process drives all devices of its host, under Slurm and Open MPI too.
                _initialize(has_peers=False, local_device_ids=[])
            except (ValueError, KeyError):
                # JAX detects no cluster, or a cluster in which this process was started alone, as
                # by a batch script of Slurm's without srun.
                return


def _initialize(*, has_peers: bool, **how: Any) -> None:
    try:
        _say_why_before_an_abort()
        if has_peers:
            jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEATS, **how)
        else:
            detect_hosts(timeout=TIMEOUT, heartbeat_timeout_seconds=_HEARTBEATS, **how)
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        if not has_peers:
            # Nothing says that there are other processes.
            return
        raise SpmdZeroRuntimeError(
            "JAX's devices were used before the processes were connected, so that this one would "
            "train alone. Call spmdzero.init_distributed() first"
        ) from error


def _agreed_address() -> str:
    """The address of the first process's host with a free port; the same in every process."""
    told = [_free_address() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _free_address() -> str:
    return f"{own_host()}:{free_port()}"


def rendezvous() -> str:
    """An `init_method` of torch.distributed for connected processes; every process calls it."""
    told = np.zeros(_LONGEST_ADDRESS, np.uint8)
    if jax.process_index() == 0:
        address = _free_address().encode()
        told[: len(address)] = np.frombuffer(address, np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(told))
    address = told.tobytes().rstrip(b"\0").decode()
    return f"tcp://{address}?rank={jax.process_index()}&world_size={jax.process_count()}"


def detect_hosts(*, timeout: datetime.timedelta, **how: Any) -> None:
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
