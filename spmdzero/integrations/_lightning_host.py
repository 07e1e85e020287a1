"""Presents this host to Lightning as one process with one device, the CPU."""

import os
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only

from spmdzero.backend import choose, runtime
from spmdzero.backend.hosts import processes
from spmdzero.config import backend_of
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._rows_of_devices import refuse


def refuse_accelerator(accelerator: Any, processes: int, *, of: str) -> None:
    """Raises SpmdZeroUsageError if Lightning would move batches to devices, or start processes.

    Args:
        accelerator: Lightning's accelerator.
        processes: number of processes that it would have on this host.
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


def join(strategy: Any, config: Any, *, of: str) -> None:
    """Chooses the config's backend, connects several hosts, and gives Lightning the host's rank.

    Args:
        strategy: a strategy whose ranks Lightning has set from the launcher's environment.
        config: DeepSpeed's config, as a dict or not yet read.
        of: ``"Trainer"`` or ``"Fabric"``, for the message.

    Raises:
        SpmdZeroUsageError: Lightning has a different number of hosts, or a different rank; or its
            batch sizes are to be those of a device.
    """
    refuse("Lightning's loaders aren't joined")
    if isinstance(config, dict):
        choose(backend_of(config))
    processes.join()
    hosts, rank = runtime.process_count(), runtime.process_index()
    if strategy.world_size != hosts:
        raise SpmdZeroUsageError(
            f'{of}(strategy="spmdzero", num_nodes={strategy.world_size}), and {hosts} '
            f"{'hosts train' if hosts > 1 else 'host trains'} together: a host would read the rows "
            f"of others, or not all. Say num_nodes={hosts}, or start as many hosts"
        )
    if hosts == 1:
        return
    # Lightning reads NODE_RANK, which few launchers set, and each host would be the first.
    strategy.cluster_environment.set_global_rank(rank)
    if strategy.global_rank != rank:
        raise SpmdZeroUsageError(
            f"Lightning takes this host for number {strategy.global_rank}, by "
            f"{type(strategy.cluster_environment).__name__}, and it is number {rank}: start the "
            "hosts by spmdzero launch or torchrun, or set NODE_RANK"
        )
    rank_zero_only.rank = rank  # pyrefly: ignore[missing-attribute]


def own_config(given: Any, strategy: Any) -> bool:
    """Whether `strategy.config` is its default, without a `given` config; removes NVMe from it."""
    if given is not None or strategy.DEEPSPEED_ENV_VAR in os.environ:
        return False
    del strategy.config["aio"]
    return True


class _Registry:
    """One of Lightning's registries, in which names that are taken get another meaning."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def register(self, name: str, strategy: type, **more: Any) -> None:
        """Makes `name` a strategy of spmdzero."""
        self._registry.register(name, strategy, override=True, **more)


def register(registry: Any, strategy: Any) -> None:
    """Makes `strategy="spmdzero"` known to one of Lightning's registries.

    The names of Lightning's own DeepSpeed strategies mean it as well: `import deepspeed` gives
    spmdzero, and Lightning's check for CUDA would refuse them.
    """
    own = _Registry(registry)
    own.register("spmdzero", strategy, description="ZeRO on all devices, by spmdzero")
    super(strategy, strategy).register_strategies(own)
