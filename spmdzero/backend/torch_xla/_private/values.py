"""The state of a tensor on the devices: pending operations, a buffer, or no data."""

import re
from collections.abc import Sequence

import torch
from torch_xla import _XLAC as _C

_BUFFER_IDS = re.compile(r"TensorID: (\d+)\s+AliasID: (\d+)")


def are_pending(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each tensor is the result of operations that have not been started."""
    return _C._check_tensor_need_materialization(list(tensors))


def compute(tensor: torch.Tensor) -> None:
    """Computes a pending tensor, as reading it does."""
    if any(are_pending([tensor])):
        _C._xla_sync_multi([tensor], [], True, False)


def replace(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Gives `tensor` the value of `other`, even if `tensor` is wrapped."""
    _C._replace_xla_tensor(tensor, other)


def set_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Makes `tensor`, its views and the tensors detached from it hold the value of `value`.

    Setting `.data` would leave those others on a buffer that may be gone.
    """
    torch._functionalize_replace(tensor, torch._from_functional_tensor(value))
    torch._functionalize_commit_update(tensor)
    torch._functionalize_sync(tensor)


def write_stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """A stamp that changes whenever `tensor` is written: in place, by a view, or by `.data`."""
    # A tensor assigned to .data has an id of its own, which a write with copy_ doesn't change. The
    # version counter misses writes through .data and writes into lists.
    return _C._xla_get_tensor_id(tensor), torch._functionalize_mutation_counter(tensor)


def buffer_ids(tensor: torch.Tensor) -> tuple[int, int]:
    """The id of `tensor`, and the id of the input whose buffer its pending value will reuse.

    Both are the same for a tensor that is not pending, and for one that is not an update in place.
    """
    found = _BUFFER_IDS.search(_C._get_xla_tensor_debug_info(tensor))
    assert found is not None
    return int(found[1]), int(found[2])


def output_ids(roots: Sequence[torch.Tensor]) -> list[str]:
    """A name for each pending value; tensors with the same name are one output of a program."""
    return [_C._unique_id_for_ir_and_data(root) for root in roots]
