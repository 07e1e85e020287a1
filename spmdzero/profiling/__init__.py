"""What a step costs: operations by module, collectives, memory, in DeepSpeed's form; traces."""

from spmdzero.profiling._attach import attach
from spmdzero.profiling._trace import profile

__all__ = ["attach", "profile"]
