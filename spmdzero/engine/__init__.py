"""The DeepSpeed-compatible engine."""

from spmdzero.data._loader import ZeroDataLoader
from spmdzero.data._sampler import ReplicaBatchSampler
from spmdzero.engine._access import (
    read_gradient,
    read_master,
    read_state,
    write_gradient,
    write_master,
    write_state,
)
from spmdzero.engine._captured import CapturedSteps
from spmdzero.engine._engine import Engine
from spmdzero.engine._folded import FoldedCalls
from spmdzero.engine._initialize import initialize
from spmdzero.engine._loss import find_loss, inputs_of
from spmdzero.engine._optimizer import ZeroOptimizer
from spmdzero.engine._parameter import ZeroParameter, membership
from spmdzero.engine._programs import Call, Compilation, ProgramLog, changed_calls
from spmdzero.engine._snapshot import StepGraph

__all__ = [
    "Call",
    "CapturedSteps",
    "Compilation",
    "Engine",
    "FoldedCalls",
    "ProgramLog",
    "ReplicaBatchSampler",
    "StepGraph",
    "ZeroDataLoader",
    "ZeroOptimizer",
    "ZeroParameter",
    "changed_calls",
    "find_loss",
    "initialize",
    "inputs_of",
    "membership",
    "read_gradient",
    "read_master",
    "read_state",
    "write_gradient",
    "write_master",
    "write_state",
]
