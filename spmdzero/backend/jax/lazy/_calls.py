"""Answers to Python calls for which torch uses a flag, a library or a tensor's memory."""

from typing import Any

import torch

from spmdzero.backend.jax.lazy._dispatch import read
from spmdzero.backend.jax.lazy._libraries import without_own_kernels
from spmdzero.backend.jax.lazy._python import answer
from spmdzero.backend.jax.lazy._tensor import DEVICE, LazyTensor

_Tensor = torch.Tensor


@answer(torch.lstm)
def _lstm(*args: Any) -> Any:
    # torch has a library for the CPU, with operations of its own.
    with without_own_kernels():
        return torch.lstm(*args)


@answer(_Tensor.resolve_conj, _Tensor.resolve_neg)
def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    # C++ sets a flag, which is a step of the view here: resolving makes another tensor.
    flags = (torch.ops.aten._conj.default, torch.ops.aten._neg_view.default)
    turned = isinstance(tensor, LazyTensor) and any(step.func in flags for step in tensor.steps)
    return tensor.clone() if turned else tensor


@answer(torch.tensor_split, _Tensor.tensor_split)
def _tensor_split(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # torch reads the places of the splits from a tensor's memory.
    def numbers(given: Any) -> Any:
        return read(given).tolist() if isinstance(given, torch.Tensor) else given

    split: Any = torch.tensor_split
    if "tensor_indices_or_sections" in kwargs:
        args = (kwargs.pop("tensor_indices_or_sections"), *args)
    return split(tensor, *map(numbers, args), **kwargs)


@answer(_Tensor.__setitem__)
def _set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
    if mask and isinstance(value, torch.Tensor) and value.requires_grad:
        after = tensor.dim() - index.dim()
        if index.shape == tensor.shape[: index.dim()] and value.dim() <= after:
            # The gradient of torch's operation selects by the mask, which gives a shape that
            # depends on data; the gradient of `where` is 0 where the mask doesn't hold.
            where = index.to(DEVICE).reshape(index.shape + (1,) * after)
            tensor.copy_(torch.where(where, value.to(tensor.dtype), tensor))
            return
    tensor.__setitem__(index, value)
