"""What accelerate must know before it counts processes and makes an engine.

It finds other processes by itself where there is a GPU, and else only when it is asked for the CPU,
which turns DeepSpeed off (`accelerate/state.py`, `PartialState`). So each of several hosts would
count itself alone, and read all rows.
"""

import os
import sys
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from spmdzero.backend import choose
from spmdzero.backend.hosts import processes
from spmdzero.config import backend_of, load_config
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._after_import import after_import
from spmdzero.integrations._replaced import in_place_of

ASKED = "ACCELERATE_USE_DEEPSPEED"
_PARALLEL = "tensor_parallel"


def follow_imports() -> None:
    """Has accelerate count a process for each host, and refuse first what has no place here."""
    after_import("accelerate.state", _count_hosts)
    after_import("accelerate.state", _join_hosts)
    after_import("accelerate.accelerator", _refuse_first)


def require_counted(hosts: int) -> None:
    """Makes sure that accelerate, where it is in use, counts a process for each host.

    Raises:
        SpmdZeroUsageError: it counts others, as a release that `_count_hosts` doesn't know would.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if hosts == 1 or state is None or not state._shared_state:
        return
    counted = state().num_processes
    if counted != hosts:
        raise SpmdZeroUsageError(
            f"accelerate counts {counted} process, and {hosts} hosts train together: each would "
            "read all rows. Use accelerate 1.15, and call spmdzero.integrations.install() before "
            "`import accelerate`"
        )


def refuse_late(package: str) -> NoReturn:
    """Refuses a client that was imported when there was no deepspeed yet.

    Raises:
        SpmdZeroUsageError: always.
    """
    raise SpmdZeroUsageError(
        f"{package} was imported before spmdzero.integrations, when it found no package "
        "deepspeed, and has left out what it does with one. Call spmdzero.integrations.install() "
        f"before `import {package}`, start the script by `spmdzero run`, or install "
        "spmdzero-deepspeed"
    )


def _count_hosts(states: Any) -> None:
    @in_place_of(states.PartialState, "_prepare_backend")
    def _prepare_backend(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # Whether there are others is asked of the devices' runtime: not by who only launches.
        if os.environ.get(ASKED, "").lower() == "true" and not processes.is_alone():
            processes.join()
            if dist.get_world_size() > 1:
                _name_place()
                # Its own choice, "cpu:0", is to torch another device than a tensor's "cpu".
                self.device = torch.device("cpu")
                return "gloo", states.DistributedType.MULTI_CPU
        return original(self, *args, **kwargs)


def _join_hosts(states: Any) -> None:
    @in_place_of(states.AcceleratorState, "__init__")
    def make(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # From here on it hands collectives to torch. DeepSpeed's launcher would have had it make
        # the group for them by now, and a lone process has no launcher.
        if not dist.is_initialized() and self.distributed_type == states.DistributedType.DEEPSPEED:
            choose(backend_of(self.deepspeed_plugin.deepspeed_config))
            processes.join()


def _name_place() -> None:
    """Sets what accelerate reads of a launcher's environment, where none has set it."""
    place = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    # One process has all devices of a host.
    place |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, value in place.items():
        os.environ.setdefault(name, str(value))


def _refuse_first(accelerators: Any) -> None:
    @in_place_of(accelerators.Accelerator, "_prepare_deepspeed")
    def _prepare_deepspeed(original: Any, self: Any, *args: Any) -> Any:
        if not hasattr(accelerators, "DummyOptim"):
            refuse_late("accelerate")
        section = self.deepspeed_plugin.deepspeed_config.get(_PARALLEL)
        if section is not None:
            # accelerate makes a mesh of processes for it, which torch refuses without a reason.
            load_config({"train_batch_size": 1, _PARALLEL: section})
        return original(self, *args)
