"""The DeepSpeed-compatible engine."""

from spmdzero.data._loader import ZeroDataLoader
from spmdzero.data._sampler import ReplicaBatchSampler
from spmdzero.engine._captured import CapturedCalls
from spmdzero.engine._ds_attributes import ZeroParamStatus
from spmdzero.engine._engine import Engine
from spmdzero.engine._initialize import engines_made, initialize
from spmdzero.engine._launching import RepeatedRows, StepGraph
from spmdzero.engine._loss import find_loss, inputs_of
from spmdzero.engine._offers import offers
from spmdzero.engine._parameter import ZeroParameter, release, trained_parameter
from spmdzero.engine._plan_of import mesh_of, plan_of
from spmdzero.engine._programs import Call, Compilation, changed_calls
from spmdzero.engine._setup import start_devices
from spmdzero.engine._tensor_axis import ask_for_size, with_mpus_size
from spmdzero.engine._work_count import WorkCount, counting_work
from spmdzero.step._optimizer import ZeroOptimizer

__all__ = [
    "Call",
    "CapturedCalls",
    "Compilation",
    "Engine",
    "RepeatedRows",
    "ReplicaBatchSampler",
    "StepGraph",
    "WorkCount",
    "ZeroDataLoader",
    "ZeroOptimizer",
    "ZeroParamStatus",
    "ZeroParameter",
    "ask_for_size",
    "changed_calls",
    "counting_work",
    "engines_made",
    "find_loss",
    "initialize",
    "inputs_of",
    "mesh_of",
    "offers",
    "plan_of",
    "release",
    "start_devices",
    "trained_parameter",
    "with_mpus_size",
]
