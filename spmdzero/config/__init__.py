"""The DeepSpeed JSON: its keys that spmdzero honours, ignores or refuses."""

from spmdzero.config._auto import with_stand_ins
from spmdzero.config._batch_sizes import BatchSizes, resolve_batch_sizes
from spmdzero.config._check import ConfigReport, Refused, check_config, load_config
from spmdzero.config._contexts import FP16_WITHOUT_ZERO
from spmdzero.config._keys import NO_MEANING
from spmdzero.config._models import OptimizerConfig, SchedulerConfig, SpmdZeroConfig
from spmdzero.config._monitoring import (
    CometConfig,
    CsvConfig,
    TensorBoardConfig,
    WandbConfig,
)
from spmdzero.config._optimizers import OPTIMIZERS, REFUSED_OPTIMIZERS
from spmdzero.config._params import check_params
from spmdzero.config._precision import Fp16Config, TorchAutocastConfig
from spmdzero.config._read import named_by, old_argument, one_of, read, set_keys, with_value
from spmdzero.config._schedules import SCHEDULES
from spmdzero.config._spmd import backend_of, mesh_axes_of
from spmdzero.config._tensor_parallel import (
    PRESETS,
    LayerSpec,
    TensorParallelConfig,
)
from spmdzero.config._types import Rate, Section

__all__ = [
    "FP16_WITHOUT_ZERO",
    "NO_MEANING",
    "OPTIMIZERS",
    "PRESETS",
    "REFUSED_OPTIMIZERS",
    "SCHEDULES",
    "BatchSizes",
    "CometConfig",
    "ConfigReport",
    "CsvConfig",
    "Fp16Config",
    "LayerSpec",
    "OptimizerConfig",
    "Rate",
    "Refused",
    "SchedulerConfig",
    "Section",
    "SpmdZeroConfig",
    "TensorBoardConfig",
    "TensorParallelConfig",
    "TorchAutocastConfig",
    "WandbConfig",
    "backend_of",
    "check_config",
    "check_params",
    "load_config",
    "mesh_axes_of",
    "named_by",
    "old_argument",
    "one_of",
    "read",
    "resolve_batch_sizes",
    "set_keys",
    "with_stand_ins",
    "with_value",
]
