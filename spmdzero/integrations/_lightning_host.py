"""What Lightning is told of this host: one process, whose one device is the CPU."""

import os
from typing import Any

import spmdzero
from spmdzero.backend import choose
from spmdzero.config import backend_of
from spmdzero.errors import SpmdZeroUsageError


def refuse_accelerator(accelerator: Any, processes: int, *, of: str) -> None:
    """Raises SpmdZeroUsageError for what would move batches elsewhere, or start processes.

    Args:
        accelerator: Lightning's.
        processes: how many it would have on this host.
        of: ``"Trainer"`` or ``"Fabric"``, for the message.
    """
    name = type(accelerator).__name__
    if name != "CPUAccelerator":
        raise SpmdZeroUsageError(
            f'{of}(strategy="spmdzero") with {name}: batches stay on the CPU, from where the '
            "engine uploads each device its rows, and the devices are XLA's, which Lightning "
            f'needn\'t know. Say {of}(accelerator="cpu", strategy="spmdzero"), on a TPU too'
        )
    if processes != 1:
        raise SpmdZeroUsageError(
            f'{of}(strategy="spmdzero", devices={processes}) would start {processes} processes on '
            "this host, but one process drives all of its devices: leave `devices` out. How many "
            "there are is PJRT's to say (on a CPU: CPU_NUM_DEVICES=8)"
        )


def join(processes: int, config: Any) -> None:
    """Takes the config's backend, and connects the processes, one per host, if several."""
    if isinstance(config, dict):
        choose(backend_of(config))
    if processes > 1:
        spmdzero.init_distributed()


def own_config(given: Any, strategy: Any) -> bool:
    """Whether `strategy.config` is its own, for want of a `given` one; leaves NVMe out of that."""
    if given is not None or strategy.DEEPSPEED_ENV_VAR in os.environ:
        return False
    del strategy.config["aio"]
    return True


def register(registry: Any, strategy: type) -> None:
    """Makes `strategy="spmdzero"` known to one of Lightning's registries."""
    registry.register(
        "spmdzero", strategy, description="ZeRO-1/2 on all devices, by spmdzero", override=True
    )
