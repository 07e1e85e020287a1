"""`deepspeed.runtime.zero`: `spmdzero.zero` by its long name."""

from spmdzero.zero import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]
