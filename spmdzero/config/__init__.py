"""The DeepSpeed JSON: what spmdzero honours, what has no meaning here, what it refuses."""

from spmdzero.config._classes import KeyClass, key_class
from spmdzero.config._combinations import require_scaled_loss
from spmdzero.config._keys import NO_MEANING
from spmdzero.config._load import load_config
from spmdzero.config._models import OptimizerConfig, SchedulerConfig, SpmdZeroConfig
from spmdzero.config._monitoring import (
    CommsLoggerConfig,
    CsvConfig,
    FlopsProfilerConfig,
    TensorBoardConfig,
    WandbConfig,
)
from spmdzero.config._optimizers import OPTIMIZERS
from spmdzero.config._params import check_params
from spmdzero.config._precision import Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from spmdzero.config._refused_optimizers import REFUSED_OPTIMIZERS
from spmdzero.config._schedules import SCHEDULES
from spmdzero.config._spmd import SpmdConfig
from spmdzero.config._triangle import BatchSizes, resolve_batch_sizes
from spmdzero.config._types import Section
from spmdzero.config._without_effect import ActivationCheckpointingConfig
from spmdzero.config._zero import ZeroConfig

__all__ = [
    "NO_MEANING",
    "OPTIMIZERS",
    "REFUSED_OPTIMIZERS",
    "SCHEDULES",
    "ActivationCheckpointingConfig",
    "BatchSizes",
    "Bf16Config",
    "CommsLoggerConfig",
    "CsvConfig",
    "DataTypesConfig",
    "FlopsProfilerConfig",
    "Fp16Config",
    "KeyClass",
    "OptimizerConfig",
    "SchedulerConfig",
    "Section",
    "SpmdConfig",
    "SpmdZeroConfig",
    "TensorBoardConfig",
    "TorchAutocastConfig",
    "WandbConfig",
    "ZeroConfig",
    "check_params",
    "key_class",
    "load_config",
    "require_scaled_loss",
    "resolve_batch_sizes",
]
