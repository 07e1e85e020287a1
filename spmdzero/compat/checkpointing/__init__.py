"""`deepspeed.checkpointing`: activation checkpointing that XLA can't undo."""

from typing import Any

from spmdzero.compat import refusals
from spmdzero.compat.checkpointing._checkpoint import (
    bwc_tensor_model_parallel_rank,
    checkpoint,
    configure,
    is_configured,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
)
from spmdzero.compat.checkpointing._random import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

__all__ = [
    "CudaRNGStatesTracker",
    "bwc_tensor_model_parallel_rank",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]


def __getattr__(name: str) -> Any:
    return refusals.attribute("checkpointing", name)
