"""Torch's backward passes, of tensors that are not asked for an answer of their own."""

import types
from typing import Any

import torch


def _unasked(function: Any) -> Any:
    """Torch's own, which doesn't ask its tensors for an answer: it would again and again."""
    made = types.FunctionType(
        function.__code__,
        vars(torch.autograd) | {"has_torch_function": lambda _: False},
        argdefs=function.__defaults__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


backward, grad = _unasked(torch.autograd.backward), _unasked(torch.autograd.grad)
