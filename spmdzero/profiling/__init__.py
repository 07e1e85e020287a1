"""The costs of a step in DeepSpeed's form: operations by module, collectives, memory; traces."""

from typing import Any

from spmdzero.compat import refusals
from spmdzero.profiling._attach import attach
from spmdzero.profiling._backward_scopes import backward_scopes
from spmdzero.profiling._modules import module_of, module_scopes, traced_in
from spmdzero.profiling._trace import profile

__all__ = ["attach", "backward_scopes", "module_of", "module_scopes", "profile", "traced_in"]


def __getattr__(name: str) -> Any:
    return refusals.attribute("profiling", name)
