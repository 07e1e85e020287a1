"""Everything that knows torch_xla: runtime, mesh, annotations, the replica region."""

import logging
import os
import sys

from spmdzero.backend.torch_xla import _chips

if "torch_xla" not in sys.modules:
    # torch_xla chooses while it is imported, and warns when it has to guess.
    os.environ.setdefault("PJRT_DEVICE", "TPU" if _chips.are_here() else "CPU")
    # XLA warns at each compile that GSPMD propagation will give way to Shardy; errors still show.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # torch_xla calls basicConfig, after which a script's own does nothing.
    handlers = list(logging.root.handlers)
    import torch_xla  # noqa: F401

    logging.root.handlers[:] = handlers

from spmdzero.backend.torch_xla import compile_cache, counters, flags, memory_maps, runtime, tracing
from spmdzero.backend.torch_xla._autograd_graph import nodes_behind
from spmdzero.backend.torch_xla._boundary import refuse_leak
from spmdzero.backend.torch_xla._global import GlobalForward
from spmdzero.backend.torch_xla._norm import global_norm
from spmdzero.backend.torch_xla._outputs import RegionRules
from spmdzero.backend.torch_xla._passage import Passage, Tracing
from spmdzero.backend.torch_xla._place import place as place_in_code
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
from spmdzero.backend.torch_xla._random import draw_keys
from spmdzero.backend.torch_xla._reads import in_region
from spmdzero.backend.torch_xla._tree import Batch, Replicated, map_tensors, replicated
from spmdzero.backend.torch_xla.capture import CapturedProgram, compile_alone
from spmdzero.backend.torch_xla.folding import (
    FoldedFunction,
    StandInKeptError,
    fold,
    no_stand_in_left,
    same_value,
    stand_in,
)
from spmdzero.backend.torch_xla.mesh import DeviceMesh, local_shards
from spmdzero.backend.torch_xla.placeholders import AnnotatedProgram, Placeholders
from spmdzero.backend.torch_xla.recompute import recomputed
from spmdzero.backend.torch_xla.reduction import GradientReduction
from spmdzero.backend.torch_xla.region import ReplicaRegion, refuse_gradient_hooks
from spmdzero.backend.torch_xla.strangers import record_uploads, strangers

__all__ = [
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
    "place_in_code",
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
