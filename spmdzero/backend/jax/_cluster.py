"""How this process finds the others: by its launcher's variables, or as JAX detects a cluster."""

import atexit
import ctypes
import os
import signal
import sys
import warnings
from typing import Any

import jax
import numpy as np
import torch.distributed as dist
from jax.experimental import multihost_utils

from spmdzero.backend.hosts._launched import (
    TIMEOUT,
    free_port,
    is_launched,
    join_launched,
    own_host,
)
from spmdzero.backend.hosts._watching import begin, watch
from spmdzero.backend.jax import _detected
from spmdzero.errors import SpmdZeroRuntimeError

# JAX ends a process without a word of ours where another one's heartbeats stop for so long.
_HEARTBEATS = 24 * 3600
_LONGEST_ADDRESS = 256


@atexit.register
def _past_the_barrier() -> None:
    """At the end of a process that failed: JAX would wait for the others, which wait for it."""
    watched = watch()
    if watched is None:
        return
    # Python gives no thread its lock any more: one that aborts would be ended, and abort for that.
    ctypes.CDLL(None).signal(signal.SIGABRT, None)
    if watched.failed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _before_abort(_: int) -> None:
    watched = watch()
    if watched is not None:
        watched.await_verdict()


# ctypes keeps no reference of its own.
_BEFORE_ABORT = ctypes.CFUNCTYPE(None, ctypes.c_int)(_before_abort)


def _say_why_before_an_abort() -> None:
    """Where the first process dies, JAX's client aborts the others at once, from its own thread.

    No exception comes of that, and Python runs its handlers of signals in the main thread, which
    may wait for the devices. So the handler is one of C, called by the thread that aborts.
    """
    ctypes.CDLL(None).signal(signal.SIGABRT, _BEFORE_ABORT)


def connect() -> None:
    """Connects the devices of all processes, unless that was done, or this process is alone.

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
            # Kubernetes is named there even where a single pod runs a notebook.
            warnings.simplefilter("ignore", UserWarning)
            try:
                # One process drives all devices of its host, under Slurm and Open MPI too.
                _initialize(has_peers=False, local_device_ids=[])
            except (ValueError, KeyError):
                # JAX detects no cluster, or one in which this process was started by itself, as by
                # a batch script of Slurm's without srun.
                return


def _initialize(*, has_peers: bool, **how: Any) -> None:
    try:
        _say_why_before_an_abort()
        if has_peers:
            jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEATS, **how)
        else:
            _detected.initialize(timeout=TIMEOUT, heartbeat_timeout_seconds=_HEARTBEATS, **how)
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        if not has_peers:
            # Nobody says that there are others.
            return
        raise SpmdZeroRuntimeError(
            "JAX's devices were used before the processes were connected, so that this one would "
            "train alone. Call spmdzero.init_distributed() first"
        ) from error


def _agreed_address() -> str:
    """A free port of the first process, and its host, in every process."""
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
