"""Libraries that C++ has for the CPU, which it takes the devices' tensors for."""

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextlib.contextmanager
def without_own_kernels() -> Iterator[None]:
    """Inside, torch calls no library that has operations of its own."""
    before = torch._C._get_mkldnn_enabled()
    # The setter of torch.backends warns of a device that is of no concern.
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)
