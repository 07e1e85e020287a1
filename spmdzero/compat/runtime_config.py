"""`deepspeed.runtime.config`: the checked config under DeepSpeed's names."""

from typing import Any

from spmdzero.backend import choose, runtime
from spmdzero.compat.getters import DeepSpeedConfigNames
from spmdzero.config import load_config, resolve_batch_sizes
from spmdzero.engine import mesh_of
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError

DeepSpeedConfigError = SpmdZeroConfigError
# What `engine.optimizer_name()` is compared with.
ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"


class DeepSpeedConfig(DeepSpeedConfigNames):
    """A checked config, with the batch sizes resolved for all devices of the job.

    Other keys and sections are attributes: `config.zero_optimization.stage`, or with DeepSpeed's
    name, `config.zero_config.stage`.

    Args:
        config: path of a DeepSpeed JSON, or its dict.
        mpu, mesh_device: None; there is no model parallelism.

    Raises:
        SpmdZeroConfigError: the config can't be honoured.
        SpmdZeroUsageError: `mpu` or `mesh_device` is given.
    """

    def __init__(self, config: Any, mpu: None = None, mesh_device: None = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise SpmdZeroUsageError(
                "DeepSpeedConfig(mpu=..., mesh_device=...): there is no model parallelism. "
                "Leave them out"
            )
        settings = load_config(config)
        choose(settings.spmd.backend)
        runtime.start()
        mesh = mesh_of(settings, runtime.device_count())
        batch = resolve_batch_sizes(settings, dp_world_size=mesh.replicas)
        super().__init__(settings, batch)
