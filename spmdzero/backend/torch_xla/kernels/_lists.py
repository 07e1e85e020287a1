"""Writes into lists of tensors, `torch._foreach_*_`, which torch_xla doesn't count as writes."""

import functools
from typing import Any

import torch

from spmdzero.backend.torch_xla.kernels._wrap import Kernel, wrap_kernel


@functools.cache
def mend_writes_into_lists() -> None:
    """Makes each of them do what torch's own kernels do.

    They increment the tensors' versions. From these autograd knows that a saved tensor was written,
    and that a view belongs to a newer value, without which its gradient is wrong. And they write a
    tensor once for each time that it, or a part of it, is in the list.
    """
    for name in torch._C._dispatch_get_all_op_names():
        operation = name.removeprefix("aten::")
        in_place = operation.startswith("_foreach_") and operation.partition(".")[0].endswith("_")
        if in_place and torch._C._dispatch_has_kernel_for_dispatch_key(name, "Functionalize"):
            wrap_kernel(operation, _mended, key="Functionalize")


def _mended(kernel: Kernel) -> Kernel:
    def written(keys: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        if len(storages) == len(tensors):
            kernel(keys, tensors, *args, **kwargs)
        else:
            for place, tensor in enumerate(tensors):
                kernel(keys, [tensor], *(_part(arg, place) for arg in args), **kwargs)
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])

    return written


def _part(arg: Any, place: int) -> Any:
    """The part of an argument that belongs to one tensor of the list."""
    each = isinstance(arg, list | tuple) or (isinstance(arg, torch.Tensor) and arg.dim() == 1)
    return arg[place : place + 1] if each else arg
