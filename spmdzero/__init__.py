"""ZeRO-1/2 as sharding annotations: DeepSpeed's engine on PyTorch/XLA SPMD."""

from importlib.metadata import version
from typing import Any

# Imported for what it registers: how plans, ledgers and reports are shown.
from spmdzero import show as _show  # noqa: F401
from spmdzero._initialize import initialize
from spmdzero._logging import show_log_lines
from spmdzero.audit import AuditReport, Diagnosis, Finding, audit, auditing, doctor
from spmdzero.backend.torch_xla import local_shards, replicated
from spmdzero.compat import (
    accelerator,
    checkpoint,
    checkpointing,
    comm,
    launcher,
    ops,
    refusals,
    runtime,
    utils,
    zero,
)
from spmdzero.compat._arguments import add_config_arguments
from spmdzero.compat._old_paths import keep_old_paths
from spmdzero.compat._refused_modules import refuse_modules
from spmdzero.compat.accelerator import get_accelerator
from spmdzero.compat.comm import init_distributed
from spmdzero.compat.runtime.base_optimizer import DeepSpeedOptimizer
from spmdzero.compat.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from spmdzero.compat.runtime.engine import DeepSpeedEngine
from spmdzero.compat.utils import OnDevice, log_dist, logger
from spmdzero.engine import Engine
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
from spmdzero.inspect import CollectiveLedger, ShardView, measure, record_ledgers, shards
from spmdzero.plan import ShardingPlan
from spmdzero.profiling import profile

__version__ = version("spmdzero")
show_log_lines()
keep_old_paths()
refuse_modules()

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
