"""Everything that knows torch_xla: runtime, mesh, annotations, the replica region."""

import logging
import os
import sys

from spmdzero.backend._autograd_graph import nodes_behind
from spmdzero.backend._keys import draw_keys
from spmdzero.backend._programs import AnnotatedProgram
from spmdzero.backend._region import RegionRules, refuse_gradient_hooks
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

from spmdzero.backend._region import Passage, Tracing
from spmdzero.backend.torch_xla import compile_cache, counters, flags, memory_maps, runtime, tracing
from spmdzero.backend.torch_xla._backend import TORCH_XLA
from spmdzero.backend.torch_xla._boundary import refuse_leak
from spmdzero.backend.torch_xla._global import GlobalForward
from spmdzero.backend.torch_xla._norm import global_norm
from spmdzero.backend.torch_xla._private import (
    ProgramLostError,
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
    start_pending,
    write_stamp,
)
from spmdzero.backend.torch_xla._reads import in_region
from spmdzero.backend.torch_xla.arrays import local_shards
from spmdzero.backend.torch_xla.capture import CapturedProgram, compile_alone
from spmdzero.backend.torch_xla.folding import (
    FoldedFunction,
    StandInKeptError,
    fold,
    no_stand_in_left,
    same_value,
    stand_in,
)
from spmdzero.backend.torch_xla.mesh import DeviceMesh
from spmdzero.backend.torch_xla.placeholders import Placeholders
from spmdzero.backend.torch_xla.recompute import recomputed
from spmdzero.backend.torch_xla.reduction import GradientReduction
from spmdzero.backend.torch_xla.region import ReplicaRegion
from spmdzero.backend.torch_xla.strangers import record_uploads, strangers

__all__ = [
    "TORCH_XLA",
    "AnnotatedProgram",
    "Batch",
    "CapturedProgram",
    "DeviceMesh",
    "FoldedFunction",
    "GlobalForward",
    "GradientReduction",
    "Passage",
    "Placeholders",
    "ProgramLostError",
    "RegionRules",
    "ReplicaRegion",
    "Replicated",
    "StandInKeptError",
    "Tracing",
    "annotated_program",
    "are_pending",
    "buffer_handles",
    "buffer_ids",
    "compile_alone",
    "compile_cache",
    "counters",
    "draw_keys",
    "flags",
    "fold",
    "global_norm",
    "in_region",
    "is_split",
    "local_devices",
    "local_replicas",
    "local_shapes",
    "local_shards",
    "local_slices",
    "map_tensors",
    "memory_maps",
    "no_stand_in_left",
    "nodes_behind",
    "optimized_hlo",
    "program_text",
    "recomputed",
    "record_scopes",
    "record_uploads",
    "refuse_gradient_hooks",
    "refuse_leak",
    "replicated",
    "runtime",
    "same_value",
    "scope",
    "set_value",
    "sharding_of",
    "shardings_of",
    "stand_in",
    "start_pending",
    "strangers",
    "tracing",
    "write_stamp",
]
