"""DeepSpeed's pipelines, whose layers run one after the other on every device."""

from spmdzero.compat.pipe._engine import PipelineEngine, engine_class_of
from spmdzero.compat.pipe._module import LayerSpec, PipelineError, PipelineModule, TiedLayerSpec
from spmdzero.compat.pipe._topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineEngine",
    "PipelineError",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
    "engine_class_of",
]
