"""Everything that knows torch_xla: runtime, mesh, annotations, the replica region."""

import os
import sys

if "torch_xla" not in sys.modules:
    # XLA warns at each compile that GSPMD propagation will give way to Shardy; errors still show.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from spmdzero.xla import runtime
from spmdzero.xla._norm import global_norm
from spmdzero.xla._private import optimized_hlo, record_scopes, scope, sharding_of
from spmdzero.xla._tree import Batch, Replicated, map_tensors, replicated
from spmdzero.xla.mesh import DeviceMesh, local_shards
from spmdzero.xla.reduction import GradientReduction
from spmdzero.xla.region import RegionRules, ReplicaRegion, run_global

__all__ = [
    "Batch",
    "DeviceMesh",
    "GradientReduction",
    "RegionRules",
    "ReplicaRegion",
    "Replicated",
    "global_norm",
    "local_shards",
    "map_tensors",
    "optimized_hlo",
    "record_scopes",
    "replicated",
    "run_global",
    "runtime",
    "scope",
    "sharding_of",
]
