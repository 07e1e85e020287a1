"""Where every tensor of a ZeRO step lives on the mesh. This package knows no backend."""

from spmdzero.plan._blocks import BLOCK, coded_slot, scale_slot
from spmdzero.plan._choose import choose_placement
from spmdzero.plan._dtypes import itemsize
from spmdzero.plan._estimate import estimate_zero2_model_states_mem_needs
from spmdzero.plan._layout import Layout
from spmdzero.plan._memory import MemoryReport, StageComparison
from spmdzero.plan._mesh import MeshSpec, axes_of_region, batch_axes, entry_of, names_of
from spmdzero.plan._placement import Placement
from spmdzero.plan._plan import ShardingPlan
from spmdzero.plan._roles import Role
from spmdzero.plan._sizes import sized
from spmdzero.plan._tensors import ParamSpec, RoleState, TensorPlan

__all__ = [
    "BLOCK",
    "Layout",
    "MemoryReport",
    "MeshSpec",
    "ParamSpec",
    "Placement",
    "Role",
    "RoleState",
    "ShardingPlan",
    "StageComparison",
    "TensorPlan",
    "axes_of_region",
    "batch_axes",
    "choose_placement",
    "coded_slot",
    "entry_of",
    "estimate_zero2_model_states_mem_needs",
    "itemsize",
    "names_of",
    "scale_slot",
    "sized",
]
