"""torch's backward passes without calls to `__torch_function__` of the tensors they take."""

import types
from typing import Any

import torch


def _without_overrides(function: Any) -> Any:
    """A copy of torch's function that doesn't call `__torch_function__`, and so itself again."""
    made = types.FunctionType(
        function.__code__,
        vars(torch.autograd) | {"has_torch_function": lambda _: False},
        argdefs=function.__defaults__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


backward = _without_overrides(torch.autograd.backward)
grad = _without_overrides(torch.autograd.grad)
