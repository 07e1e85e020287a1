"""`deepspeed.runtime.engine`."""

from spmdzero.engine import Engine

DeepSpeedEngine = Engine

__all__ = ["DeepSpeedEngine"]
