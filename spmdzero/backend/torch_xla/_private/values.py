"""The state of a tensor on the devices: pending operations, a buffer, or no data."""

import re
from collections.abc import Sequence

import torch
import torch_xla.core.xla_builder as xb
from torch_xla import _XLAC as _C

_BUFFER_IDS = re.compile(r"TensorID: (\d+)\s+AliasID: (\d+)")


def are_pending(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each tensor is the result of operations that have not been started."""
    return _C._check_tensor_need_materialization(list(tensors))


def count_pending(device: torch.device) -> int:
    """Number of live tensors that are pending."""
    return sum(_C._check_device_tensor_need_materialization(str(device)))


def start_pending(device: torch.device) -> None:
    """Starts the pending operations as `sync` does, but ends no step of the device's generator."""
    _C._xla_sync_live_tensors(str(device), [], wait=False)


def compute(tensor: torch.Tensor) -> None:
    """Computes a pending tensor, as reading it does."""
    if any(are_pending([tensor])):
        _C._xla_sync_multi([tensor], [], True, False)


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the devices without data, which can be traced, but not marked, run or read."""
    xla_shape = xb.mkshape(xb.Op.from_torch_type(dtype), tuple(shape))
    return _C._xla_create_placeholder_tensor(xla_shape.shape)


def needs_placeholder(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is pending and can't be computed, because a placeholder has no data."""
    if tensor.device.type != "xla" or not any(are_pending([tensor])):
        return False
    return any_without_data(program_inputs([tensor])[1])


def any_without_data(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of these computed tensors is a placeholder. Waits for the devices."""
    _wait_for_values(tensors)
    return any(map(_C._is_placecholder, tensors))


def _wait_for_values(tensors: Sequence[torch.Tensor]) -> None:
    # A tensor that a running program has yet to write counts as a placeholder until then.
    if any(map(_C._is_placecholder, tensors)):
        _C._xla_wait_device_ops([])


def hold(tensors: Sequence[torch.Tensor]) -> None:
    """Makes Python own these tensors, which came from the garbage collector and not from torch."""
    for tensor in tensors:
        tensor._fix_weakref()  # type: ignore[attr-defined]


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


def latest_tensor_id() -> int:
    """The highest tensor id so far."""
    return _C._xla_get_tensor_id(torch.empty(0, device="xla"))


def tensor_id(tensor: torch.Tensor) -> int:
    """The id of `tensor`; later tensors have higher ids."""
    return _C._xla_get_tensor_id(tensor)


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


def buffer_handles(tensors: Sequence[torch.Tensor]) -> list[int]:
    """An id of the buffer of each computed tensor; tensors that share a buffer have the same.

    Waits for the devices if a running program has yet to write one of the buffers.
    """
    # Without the wait it crashes.
    _wait_for_values(tensors)
    return _C._get_tensors_handle(list(tensors))


def program_inputs(roots: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    """The buffers that the pending program of `roots` reads, in its own order.

    Returns the id of the tensor through which each buffer was first read, and a tensor over each,
    which stands for the buffer from now on: `sync` no longer knows that the buffer belongs to the
    tensor that it was read through, and would not reuse it for a value written over that tensor.
    """
    return _C._get_tensors_xla_device_data_node(list(roots))


def output_ids(roots: Sequence[torch.Tensor]) -> list[str]:
    """A name for each pending value; tensors with the same name are one output of a program."""
    return [_C._unique_id_for_ir_and_data(root) for root in roots]
