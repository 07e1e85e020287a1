"""Operations by module, read from the compiled program, under DeepSpeed's names."""

from spmdzero.profiling.flops_profiler._model import get_model_profile
from spmdzero.profiling.flops_profiler._profile import ModelProfile, ModuleProfile
from spmdzero.profiling.flops_profiler._profiler import FlopsProfiler
from spmdzero.profiling.flops_profiler._scopes import module_of, module_scopes

__all__ = [
    "FlopsProfiler",
    "ModelProfile",
    "ModuleProfile",
    "get_model_profile",
    "module_of",
    "module_scopes",
]
