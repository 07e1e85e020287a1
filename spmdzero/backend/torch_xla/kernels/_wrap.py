"""Python in the place of torch_xla's own kernels, which it may call."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

# It holds the kernels for as long as the process lives.
_library = torch.library.Library("aten", "IMPL")
Kernel = Callable[..., Any]


def wrap_kernel(name: str, wrap: Callable[[Kernel], Kernel], *, key: str = "XLA") -> None:
    """Has `wrap(kernel)` run where the kernel of `aten::name` ran; once for each name and key.

    Both are called with torch's dispatch keys, and then with the operation's arguments. A Python
    number that was given as a tensor arrives as a number, and no kernel can be called with it.

    Args:
        name: with the overload's name.
        wrap: a kernel -> what runs in its place.
        key: "XLA" for torch_xla's kernel, "Functionalize" for torch's above it, which knows what
            is written in place.
    """
    put_kernel(name, wrap(torch.library.get_kernel(f"aten::{name}", key).call_boxed), key=key)


def put_kernel(name: str, kernel: Kernel, *, key: str) -> None:
    """Has `kernel` run in the place of another, called as in `wrap_kernel`."""
    with warnings.catch_warnings():
        # torch warns that there was a kernel.
        warnings.simplefilter("ignore")
        _library.impl(name, kernel, key, with_keyset=True, allow_override=True)
