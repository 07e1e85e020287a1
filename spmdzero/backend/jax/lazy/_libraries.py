"""torch's CPU libraries, which must not get the devices' tensors: C++ takes them for the CPU's."""

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextlib.contextmanager
def without_own_kernels() -> Iterator[None]:
    """Context in which torch calls no CPU library that has operations of its own."""
    before = torch._C._get_mkldnn_enabled()
    # The setter of torch.backends would warn about a device that doesn't matter here.
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)
