"""`deepspeed.utils.groups`: all processes are data-parallel.

Ranks and sizes count processes (hosts), as in `spmdzero.comm`, and not devices. The group of those
that share rows is the exception: a process's devices do.
"""

from typing import Any

from spmdzero.compat import comm
from spmdzero.compat.accelerator import get_accelerator
from spmdzero.compat.logging import log_dist
from spmdzero.compat.parallel_state_sp import (
    get_sequence_parallel_group,
    get_sequence_parallel_rank,
    get_sequence_parallel_world_size,
)

__all__ = [
    "bwc_pipeline_parallel_world_size",
    "bwc_tensor_model_parallel_world_size",
    "get_accelerator",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "log_dist",
]


def get_data_parallel_group() -> Any:
    """The group of all processes."""
    return comm.get_world_group()


def get_data_parallel_rank() -> int:
    """The rank of this process among all processes."""
    return comm.get_rank()


def get_data_parallel_world_size() -> int:
    """Number of processes of the job, one per host."""
    return comm.get_world_size()


def get_model_parallel_group() -> None:
    """None: there is no model or tensor parallelism."""
    return None


def get_model_parallel_rank() -> int:
    """0: there is no model or tensor parallelism."""
    return 0


def get_model_parallel_world_size() -> int:
    """1: there is no model or tensor parallelism."""
    return 1


def get_tensor_model_parallel_src_rank() -> int:
    """The first rank of this process's tensor-parallel group, which is its own rank."""
    return comm.get_rank()


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """1: there is no tensor or pipeline parallelism."""
    return 1


get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size
bwc_pipeline_parallel_world_size = bwc_tensor_model_parallel_world_size
_get_sequence_parallel_group = get_sequence_parallel_group
_get_sequence_parallel_rank = get_sequence_parallel_rank
_get_sequence_parallel_world_size = get_sequence_parallel_world_size
