"""`deepspeed.runtime.config`."""

from typing import Any

from spmdzero.backend import choose, runtime
from spmdzero.config import load_config, resolve_batch_sizes
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError

DeepSpeedConfigError = SpmdZeroConfigError


class DeepSpeedConfig:
    """A checked config, its batch sizes resolved for all devices of the job.

    Other keys are attributes, sections too: `config.zero_optimization.stage`.

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
        self._settings = load_config(config)
        choose(self._settings.spmd.backend)
        runtime.start()
        batch = resolve_batch_sizes(self._settings, dp_world_size=runtime.device_count())
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation

    def __getattr__(self, name: str) -> Any:
        if name == "_settings":
            raise AttributeError(name)
        return getattr(self._settings, name)
