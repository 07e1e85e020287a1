"""Operations that take no tensor and make one on the device ``xla:0``."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from spmdzero._dispatch_mode import DispatchMode
from spmdzero.backend import _autocast_lists
from spmdzero.backend._device_index import take_over
from spmdzero.backend.forms._ranges import require_step
from spmdzero.backend.jax.lazy._dispatch import dispatched
from spmdzero.backend.jax.lazy._random import RandomState
from spmdzero.backend.jax.lazy._tensor import DEVICE, LazyTensor

_aten = torch.ops.aten
_NAMES = (
    "arange.default", "arange.start", "arange.start_step", "empty.memory_format", "empty_strided",
    "eye", "eye.m", "full", "linspace", "logspace", "ones", "randperm", "randperm.generator",
    "scalar_tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
# `_library` holds the kernels as long as the process lives.
_made = {
    getattr(getattr(_aten, name.partition(".")[0]), name.partition(".")[2] or "default", None)
    for name in _NAMES
}
_library: list[torch.library.Library] = []


@functools.cache
def register() -> None:
    """Makes torch create lazy tensors where the device is ``xla``."""
    _autocast_lists.register(DEVICE.type)
    take_over(lambda: DEVICE, _on_cpu_first)
    torch._register_device_module("xla", RandomState("torch.xla"))
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    for name in _NAMES:
        packet, _, overload = name.partition(".")
        found = getattr(_aten, packet)
        func = getattr(found, overload or "default", None)
        if func is None:
            continue
        with warnings.catch_warnings():
            # torch warns about the answer it had, which says that torch_xla isn't there.
            warnings.simplefilter("ignore")
            library.impl(name.removesuffix(".default"), functools.partial(_make, func), "XLA")


class OwnFactories(DispatchMode):
    """Puts tensors that torch's C++ code makes for its own use on the devices.

    C++ copies the options of one of its arguments, whose device it takes for the CPU. Calls from
    Python can be told apart: they say whether memory is pinned, C++ does not.
    """

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation; what it makes for C++ is on the devices."""
        device = kwargs.get("device")
        if func in _made and device is not None and kwargs.get("pin_memory") is None:
            kwargs = kwargs | {"device": DEVICE}
        if (
            func is _aten._to_copy.default
            and device is not None
            and torch.device(device).type != "meta"
            and isinstance(args[0], LazyTensor)
        ):
            # This is a gradient on its way back through a cast; Python's own moves don't come here.
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        return func(*args, **kwargs)


def _make(func: Any, *args: Any, **kwargs: Any) -> Any:
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
        # C++ would write into the memory of the result, and the process would end.
        raise RuntimeError(
            f"{func} is called past torch's dispatcher for Python, by `torch.tensor` that was "
            f"imported by name for example. Make the tensor on the CPU, and move it: .to({DEVICE})"
        )
    if func is _aten.arange.start_step and len(args) == 3:
        require_step(*args, kwargs.get("dtype"))
    return dispatched(func, args, kwargs)


def _on_cpu_first(
    make: Callable[..., torch.Tensor], data: Any, *args: Any, device: Any = None, **kwargs: Any
) -> torch.Tensor:
    """Returns what `make`, which bypasses torch's Python dispatcher, makes; on this device too."""
    if isinstance(data, list | tuple):
        data = _read(data)
    if device is None or torch.device(device).type != DEVICE.type:
        return make(data, *args, device=device, **kwargs)
    trained = kwargs.pop("requires_grad", False)
    moved = make(data, *args, **kwargs).to(DEVICE)
    return moved.requires_grad_() if trained else moved


def _read(data: Any) -> Any:
    """The numbers of nested lists, with tensors on the devices read."""
    if isinstance(data, list | tuple):
        return [_read(item) for item in data]
    return data.detach().cpu() if isinstance(data, LazyTensor) else data
