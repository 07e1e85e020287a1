"""Explains a training step as compilers, also the TPU's, compile it: memory, traffic, limits."""

from spmdzero.backend import FLAG_SETS
from spmdzero.explain._ahead import StepAhead, trace_ahead
from spmdzero.explain._aot import (
    Compiled,
    CompilerMemory,
    WaitingError,
    compile_for_tpu,
    require_slice,
    require_tpu_compiler,
)
from spmdzero.explain._attention import AttentionUse
from spmdzero.explain._calibration import CLASSES, SHORTEST, Calibrated, calibrated
from spmdzero.explain._chips import CHIPS, Chip, Topology, slices_of
from spmdzero.explain._explain import explain, explain_engine
from spmdzero.explain._explanation import Explanation
from spmdzero.explain._fit import StageFit, TargetMemory
from spmdzero.explain._kept import keeping_programs
from spmdzero.explain._moves import Moves, ProgramLedger
from spmdzero.explain._of_a_run import FirstStep
from spmdzero.explain._recompute import fit_recompute
from spmdzero.explain._refused_scatters import RefusedScatter
from spmdzero.explain._roofline import Roofline
from spmdzero.explain._time import DearOperation, Share, StepTime, siblings, step_time
from spmdzero.explain._twin import hollow
from spmdzero.explain._verdict import Change, Verdict
from spmdzero.explain._without_data import made_up

__all__ = [
    "CHIPS",
    "CLASSES",
    "FLAG_SETS",
    "SHORTEST",
    "AttentionUse",
    "Calibrated",
    "Change",
    "Chip",
    "Compiled",
    "CompilerMemory",
    "DearOperation",
    "Explanation",
    "FirstStep",
    "Moves",
    "ProgramLedger",
    "RefusedScatter",
    "Roofline",
    "Share",
    "StageFit",
    "StepAhead",
    "StepTime",
    "TargetMemory",
    "Topology",
    "Verdict",
    "WaitingError",
    "calibrated",
    "compile_for_tpu",
    "explain",
    "explain_engine",
    "fit_recompute",
    "hollow",
    "keeping_programs",
    "made_up",
    "require_slice",
    "require_tpu_compiler",
    "siblings",
    "slices_of",
    "step_time",
    "trace_ahead",
]
