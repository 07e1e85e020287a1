"""torch.autocast on the devices."""

import contextlib

import torch


def autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """`torch.autocast` in `dtype` for tensors on the devices; None changes nothing."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type="xla", dtype=dtype)
