"""Everything that knows torch_xla: runtime, mesh, annotations, the replica region."""

import logging
import os
import sys

from spmdzero.backend._left_variables import noted
from spmdzero.backend.chips._chips import has_tpu_chips

if "torch_xla" not in sys.modules:
    # torch_xla chooses the device during its import, and warns if it has to guess.
    os.environ.setdefault("PJRT_DEVICE", "TPU" if has_tpu_chips() else "CPU")
    # XLA warns at each compilation that Shardy will replace GSPMD; errors are still shown.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # torch_xla calls basicConfig, and a script's own call would then do nothing.
    handlers = list(logging.root.handlers)
    with noted():
        import torch_xla

    logging.root.handlers[:] = handlers

from spmdzero.backend._keys import draw_keys
from spmdzero.backend.forms._tree import Batch, Replicated, map_tensors, replicated
from spmdzero.backend.protocols._region import RegionRules
from spmdzero.backend.replica import GradientReduction, global_norm
from spmdzero.backend.torch_xla import compile_cache, counters, flags, memory_maps, runtime
from spmdzero.backend.torch_xla._backend import TORCH_XLA as BACKEND
from spmdzero.backend.torch_xla._private import (
    are_pending,
    optimized_hlo,
    record_scopes,
    scope,
    set_value,
    sharding_of,
)
from spmdzero.backend.torch_xla.arrays import local_shards
from spmdzero.backend.torch_xla.mesh import DeviceMesh
from spmdzero.backend.torch_xla.region import global_forward, replica_region
