"""Everything that knows torch_xla: runtime, mesh, annotations, the replica region."""

import logging
import os
import sys

from spmdzero.backend._programs import AnnotatedProgram
from spmdzero.backend._region import RegionRules
from spmdzero.backend._tree import Batch, Replicated, map_tensors, replicated
from spmdzero.backend.torch_xla._environment import has_tpu_chips

if "torch_xla" not in sys.modules:
    # torch_xla chooses while it is imported, and warns when it has to guess.
    os.environ.setdefault("PJRT_DEVICE", "TPU" if has_tpu_chips() else "CPU")
    # XLA warns at each compile that GSPMD propagation will give way to Shardy; errors still show.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # torch_xla calls basicConfig, after which a script's own does nothing.
    handlers = list(logging.root.handlers)
    import torch_xla  # noqa: F401

    logging.root.handlers[:] = handlers

from spmdzero.backend.torch_xla import compile_cache, counters, flags, memory_maps, runtime, tracing
from spmdzero.backend.torch_xla._backend import TORCH_XLA
from spmdzero.backend.torch_xla._global import GlobalForward
from spmdzero.backend.torch_xla._norm import global_norm
from spmdzero.backend.torch_xla._private import (
    annotated_program,
    are_pending,
    buffer_handles,
    buffer_ids,
    is_split,
    local_devices,
    local_replicas,
    local_shapes,
    local_slices,
    optimized_hlo,
    program_text,
    record_scopes,
    scope,
    set_value,
    sharding_of,
    shardings_of,
    write_stamp,
)
from spmdzero.backend.torch_xla.arrays import local_shards
from spmdzero.backend.torch_xla.capture import compile_alone
from spmdzero.backend.torch_xla.folding import (
    FoldedFunction,
    fold,
)
from spmdzero.backend.torch_xla.mesh import DeviceMesh
from spmdzero.backend.torch_xla.placeholders import Placeholders
from spmdzero.backend.torch_xla.reduction import GradientReduction
from spmdzero.backend.torch_xla.region import ReplicaRegion
from spmdzero.backend.torch_xla.strangers import strangers

__all__ = [
    "TORCH_XLA",
    "AnnotatedProgram",
    "Batch",
    "DeviceMesh",
    "FoldedFunction",
    "GlobalForward",
    "GradientReduction",
    "Placeholders",
    "RegionRules",
    "ReplicaRegion",
    "Replicated",
    "annotated_program",
    "are_pending",
    "buffer_handles",
    "buffer_ids",
    "compile_alone",
    "compile_cache",
    "counters",
    "flags",
    "fold",
    "global_norm",
    "is_split",
    "local_devices",
    "local_replicas",
    "local_shapes",
    "local_shards",
    "local_slices",
    "map_tensors",
    "memory_maps",
    "optimized_hlo",
    "program_text",
    "record_scopes",
    "replicated",
    "runtime",
    "scope",
    "set_value",
    "sharding_of",
    "shardings_of",
    "strangers",
    "tracing",
    "write_stamp",
]
