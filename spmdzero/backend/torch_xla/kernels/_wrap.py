"""Python in the place of torch_xla's own kernels, which it may call."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

# It holds the kernels for as long as the process lives.
_library = torch.library.Library("aten", "IMPL")
Kernel = Callable[..., Any]


def wrap_kernel(name: str, wrap: Callable[[Kernel], Kernel]) -> None:
    """Has `wrap(kernel)` run where torch_xla's kernel of `aten::name` ran; once for each name.

    Both are called with torch's dispatch keys, and then with the operation's arguments.
    """
    kernel = torch.library.get_kernel(f"aten::{name}", "XLA")
    with warnings.catch_warnings():
        # torch warns that there was a kernel.
        warnings.simplefilter("ignore")
        _library.impl(name, wrap(kernel.call_boxed), "XLA", with_keyset=True)
