"""`deepspeed.runtime.base_optimizer`: what `initialize` returns is a `DeepSpeedOptimizer`."""

from spmdzero.engine import ZeroOptimizer

DeepSpeedOptimizer = ZeroOptimizer
ZeROOptimizer = ZeroOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
