"""DeepSpeed's mixture of experts, of which every device has all experts or its part of each."""

from spmdzero.compat.moe._gate import TopKGate
from spmdzero.compat.moe._layer import Experts, MoE, MOELayer
from spmdzero.compat.moe._utils import (
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
)

__all__ = [
    "Experts",
    "MOELayer",
    "MoE",
    "TopKGate",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_into_different_moe_groups_for_optimizer",
]
