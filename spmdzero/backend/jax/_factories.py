"""Operations that take no tensor and make one on the device ``xla:0``."""

import functools
import warnings
from typing import Any

import torch

from spmdzero.backend.jax._dispatch import dispatched

_aten = torch.ops.aten
_NAMES = (
    "arange.default", "arange.start", "arange.start_step", "empty.memory_format", "empty_strided",
    "eye", "eye.m", "full", "linspace", "logspace", "ones", "scalar_tensor", "tril_indices",
    "triu_indices", "zeros",
)  # fmt: skip
# It holds the kernels for as long as the process lives.
_library: list[torch.library.Library] = []


@functools.cache
def register() -> None:
    """Has torch make lazy tensors where the device is ``xla``."""
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    for name in _NAMES:
        packet, _, overload = name.partition(".")
        found = getattr(_aten, packet)
        func = getattr(found, overload or "default", None)
        if func is None:
            continue
        with warnings.catch_warnings():
            # torch warns that it had an answer, which is that torch_xla isn't there.
            warnings.simplefilter("ignore")
            library.impl(name.removesuffix(".default"), functools.partial(_make, func), "XLA")


def _make(func: Any, *args: Any, **kwargs: Any) -> Any:
    return dispatched(func, args, kwargs)
