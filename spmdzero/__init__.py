"""ZeRO-1/2 as sharding annotations: DeepSpeed's engine on PyTorch/XLA SPMD."""

import re
from importlib.metadata import version
from typing import Any

# `show` is imported for what it registers: how plans, ledgers and reports are shown.
from spmdzero import show as _show  # noqa: F401
from spmdzero._initialize import initialize
from spmdzero._logging import show_log_lines
from spmdzero.audit import AuditReport, Diagnosis, Finding, audit, auditing, doctor
from spmdzero.backend import replicated
from spmdzero.compat import accelerator, checkpointing, comm, git_version_info, refusals
from spmdzero.compat._old_paths import keep_old_paths
from spmdzero.compat.accelerator import get_accelerator
from spmdzero.compat.comm import init_distributed
from spmdzero.compat.helpers import OnDevice, add_config_arguments
from spmdzero.compat.logging import log_dist, logger
from spmdzero.compat.runtime_config import DeepSpeedConfig, DeepSpeedConfigError
from spmdzero.engine import Engine
from spmdzero.engine import Engine as DeepSpeedEngine
from spmdzero.engine import ZeroOptimizer as DeepSpeedOptimizer
from spmdzero.errors import (
    AuditError,
    NonFiniteError,
    ReplicaRegionError,
    SpmdZeroCheckpointError,
    SpmdZeroConfigError,
    SpmdZeroError,
    SpmdZeroRuntimeError,
    SpmdZeroUsageError,
)
from spmdzero.explain import Explanation, explain
from spmdzero.inspect import (
    CollectiveLedger,
    ShardView,
    local_shards,
    measure,
    record_ledgers,
    shards,
)
from spmdzero.plan import ShardingPlan
from spmdzero.profiling import profile

__version__ = version("spmdzero")
# DeepSpeed's further names of these.
__version_major__, __version_minor__, __version_patch__ = map(
    int, re.findall(r"\d+", __version__)[:3]
)
__git_hash__, __git_branch__ = git_version_info.git_hash, git_version_info.git_branch
dist = comm
show_log_lines()
keep_old_paths()

__all__ = [
    "AuditError",
    "AuditReport",
    "CollectiveLedger",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "Diagnosis",
    "Engine",
    "Explanation",
    "Finding",
    "NonFiniteError",
    "OnDevice",
    "ReplicaRegionError",
    "ShardView",
    "ShardingPlan",
    "SpmdZeroCheckpointError",
    "SpmdZeroConfigError",
    "SpmdZeroError",
    "SpmdZeroRuntimeError",
    "SpmdZeroUsageError",
    "accelerator",
    "add_config_arguments",
    "audit",
    "auditing",
    "checkpoint",
    "checkpointing",
    "comm",
    "doctor",
    "explain",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "launcher",
    "local_shards",
    "log_dist",
    "logger",
    "measure",
    "ops",
    "profile",
    "record_ledgers",
    "replicated",
    "runtime",
    "shards",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    return refusals.attribute("", name)
