"""What a step costs: operations by module, collectives, memory, in DeepSpeed's form; traces."""

from typing import Any

from spmdzero.compat import refusals
from spmdzero.profiling._attach import attach
from spmdzero.profiling._modules import module_of, module_scopes
from spmdzero.profiling._trace import profile

__all__ = ["attach", "module_of", "module_scopes", "profile"]


def __getattr__(name: str) -> Any:
    return refusals.attribute("profiling", name)
