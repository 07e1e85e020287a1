"""The checked config under the attributes of DeepSpeed's config."""

from typing import Any

from spmdzero.config import BatchSizes, SpmdZeroConfig

# DeepSpeed's attribute (runtime/config.py) -> the config's key.
_OTHER_NAMES = {
    "activation_checkpointing_config": "activation_checkpointing",
    "aio_config": "aio",
    "bfloat16_config": "bf16",
    "checkpoint_config": "checkpoint",
    "comms_config": "comms_logger",
    "flops_profiler_config": "flops_profiler",
    "float16_config": "fp16",
    "timers_config": "timers",
    "zero_config": "zero_optimization",
}


class DeepSpeedConfigNames:
    """A checked config, under the config's own keys and DeepSpeed's attributes.

    Args:
        settings: the config.
        batch: the batch sizes.
    """

    def __init__(self, settings: SpmdZeroConfig, batch: BatchSizes) -> None:
        self._settings = settings
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation

    @property
    def zero_enabled(self) -> bool:
        """Whether the ZeRO stage is 1 or more."""
        return self.zero_optimization_stage > 0

    @property
    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self._settings.zero_optimization.stage

    @property
    def _param_dict(self) -> dict[str, Any]:
        # The JSON as it was written.
        return self._settings.source

    def __getattr__(self, name: str) -> Any:
        if name == "_settings":
            raise AttributeError(name)
        return getattr(self._settings, _OTHER_NAMES.get(name, name))
