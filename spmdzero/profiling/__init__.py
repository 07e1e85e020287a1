"""What a step costs: operations by module, collectives, memory, in DeepSpeed's form."""

from spmdzero.profiling._attach import attach

__all__ = ["attach"]
