"""Python functions in the place of torch_xla's kernels, which they may call."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

# It keeps the kernels as long as the process lives.
_library = torch.library.Library("aten", "IMPL")
Kernel = Callable[..., Any]


def wrap_kernel(name: str, wrap: Callable[[Kernel], Kernel], *, key: str = "XLA") -> None:
    """Replaces the kernel of `aten::name` by `wrap(kernel)`; once for each name and key.

    Both are called with torch's dispatch keys, and then with the operation's arguments. A Python
    number that was given as a tensor arrives as a number, which no kernel accepts.

    Args:
        name: with the overload's name.
        wrap: maps the kernel to its replacement.
        key: "XLA" for torch_xla's kernel, "Functionalize" for torch's above it, which knows which
            tensors are written in place.
    """
    put_kernel(name, wrap(torch.library.get_kernel(f"aten::{name}", key).call_boxed), key=key)


def put_kernel(name: str, kernel: Kernel, *, key: str) -> None:
    """Registers `kernel`, which is called as in `wrap_kernel`, in the place of another."""
    with warnings.catch_warnings():
        # torch warns that there was a kernel.
        warnings.simplefilter("ignore")
        _library.impl(name, kernel, key, with_keyset=True, allow_override=True)
