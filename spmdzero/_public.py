"""The names of `spmdzero` except modules under DeepSpeed's paths; it imports all layers."""

from spmdzero._initialize import initialize
from spmdzero.audit import AuditReport, Diagnosis, Finding, audit, auditing, doctor
from spmdzero.backend import replicated
from spmdzero.compat import accelerator, checkpointing, comm
from spmdzero.compat.accelerator import get_accelerator
from spmdzero.compat.comm import init_distributed
from spmdzero.compat.engine import DeepSpeedEngine
from spmdzero.compat.engine import DeepSpeedEngine as Engine
from spmdzero.compat.helpers import (
    OnDevice,
    add_config_arguments,
    set_autotp_mode,
    tp_model_init,
)
from spmdzero.compat.logging import log_dist, logger
from spmdzero.compat.optimizer import DeepSpeedOptimizer
from spmdzero.compat.pipe import PipelineEngine, PipelineModule
from spmdzero.compat.runtime_config import DeepSpeedConfig, DeepSpeedConfigError
from spmdzero.errors import (
    AuditError,
    NonFiniteError,
    OutOfRangeError,
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
from spmdzero.search import TrainingPlan, plan_for

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
    "OutOfRangeError",
    "PipelineEngine",
    "PipelineModule",
    "ReplicaRegionError",
    "ShardView",
    "ShardingPlan",
    "SpmdZeroCheckpointError",
    "SpmdZeroConfigError",
    "SpmdZeroError",
    "SpmdZeroRuntimeError",
    "SpmdZeroUsageError",
    "TrainingPlan",
    "accelerator",
    "add_config_arguments",
    "audit",
    "auditing",
    "checkpointing",
    "comm",
    "doctor",
    "explain",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "local_shards",
    "log_dist",
    "logger",
    "measure",
    "plan_for",
    "profile",
    "record_ledgers",
    "replicated",
    "set_autotp_mode",
    "shards",
    "tp_model_init",
]
