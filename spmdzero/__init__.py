"""ZeRO-1/2 as sharding annotations: DeepSpeed's engine on PyTorch/XLA SPMD."""

from importlib.metadata import version

from spmdzero._arguments import add_config_arguments
from spmdzero._logging import show_log_lines
from spmdzero.comm import init_distributed
from spmdzero.engine import Engine, initialize
from spmdzero.errors import (
    NonFiniteError,
    ReplicaRegionError,
    SpmdZeroConfigError,
    SpmdZeroError,
    SpmdZeroRuntimeError,
    SpmdZeroUsageError,
)
from spmdzero.inspect import CollectiveLedger, measure, record_ledgers
from spmdzero.plan import ShardingPlan
from spmdzero.xla import local_shards, replicated

__version__ = version("spmdzero")
show_log_lines()

__all__ = [
    "CollectiveLedger",
    "Engine",
    "NonFiniteError",
    "ReplicaRegionError",
    "ShardingPlan",
    "SpmdZeroConfigError",
    "SpmdZeroError",
    "SpmdZeroRuntimeError",
    "SpmdZeroUsageError",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "local_shards",
    "measure",
    "record_ledgers",
    "replicated",
]
