"""`deepspeed.zero`: what ZeRO-3 scripts wrap around models, which needs nothing below stage 3."""

from typing import Any

from spmdzero.compat import refusals
from spmdzero.compat.zero._contexts import (
    DeepSpeedTensorOverride,
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
)
from spmdzero.compat.zero._estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = [
    "DeepSpeedTensorOverride",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "register_external_parameter",
]


def __getattr__(name: str) -> Any:
    return refusals.attribute("zero", name)
