"""The DeepSpeed JSON: what spmdzero honours, what has no meaning here, what it refuses."""

from spmdzero.config._keys import NO_MEANING
from spmdzero.config._load import load_config
from spmdzero.config._models import (
    Bf16Config,
    DataTypesConfig,
    OptimizerConfig,
    SchedulerConfig,
    SpmdConfig,
    SpmdZeroConfig,
)
from spmdzero.config._refused_optimizers import REFUSED_OPTIMIZERS
from spmdzero.config._triangle import BatchSizes, resolve_batch_sizes
from spmdzero.config._zero import ZeroConfig

__all__ = [
    "NO_MEANING",
    "REFUSED_OPTIMIZERS",
    "BatchSizes",
    "Bf16Config",
    "DataTypesConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "SpmdConfig",
    "SpmdZeroConfig",
    "ZeroConfig",
    "load_config",
    "resolve_batch_sizes",
]
