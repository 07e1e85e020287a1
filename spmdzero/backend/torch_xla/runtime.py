"""Devices and processes: switching SPMD on in time, counts, synchronisation.

Code that writes files asks with `data_ptr()` which tensors share memory (safetensors, and so
transformers, peft, accelerate and huggingface_hub). Here those share memory that share torch's
object of a storage, as a tensor, its views and its detached copies do.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from spmdzero._replaced import in_place_of
from spmdzero.backend import _autocast_lists, _named_states
from spmdzero.backend._device_generator import take_over_generator
from spmdzero.backend._device_index import take_over
from spmdzero.backend._traced import traced
from spmdzero.backend.chips._chips import has_tpu_chips
from spmdzero.backend.chips._torus import Torus
from spmdzero.backend.torch_xla import _private, memory_maps
from spmdzero.backend.torch_xla._cpu_flags import in_force as cpu_flags
from spmdzero.backend.torch_xla._cpu_flags import start_as_torch_computes
from spmdzero.backend.torch_xla.counters import aliased_inputs
from spmdzero.backend.torch_xla.kernels import mend
from spmdzero.errors import SpmdZeroRuntimeError


def torus_of(attributes: Sequence[Mapping[str, Any]]) -> Torus | None:
    """Number of chips along each direction, x first.

    Args:
        attributes: of each device of all processes, as in torch_xla.runtime's
            `global_runtime_device_attributes`: ``name`` such as ``TPU:3``, ``coords``, and
            ``slice_index`` where there are several slices.

    Returns None where the devices don't fill one slice, or aren't numbered along x first.
    """
    if not all("coords" in each for each in attributes):
        return None
    ordered = sorted(attributes, key=lambda each: int(str(each["name"]).rpartition(":")[2]))
    coords = [tuple(each["coords"]) for each in ordered]
    torus = tuple(1 + max(place) for place in zip(*coords, strict=True))
    slices = {each.get("slice_index", 0) for each in ordered}
    if len(slices) > 1 or math.prod(torus) != len(coords):
        return None
    # NumPy calls the order with x first Fortran's.
    numbered = zip(*np.unravel_index(np.arange(len(coords)), torus, order="F"), strict=True)
    return torus if coords == [tuple(map(int, place)) for place in numbered] else None


_BECAUSE = "savers ask which tensors share memory, and torch_xla has no address, or 0 for each"


@functools.cache
def tell_storages_apart() -> None:
    """Makes torch answer with a number for each storage on the devices; once per process."""

    @in_place_of(torch.UntypedStorage, "data_ptr", because=_BECAUSE)
    def of_storage(own: Callable[..., int], self: torch.UntypedStorage) -> int:
        return self._cdata if self.device.type == "xla" else own(self)

    @in_place_of(torch.Tensor, "data_ptr", because=_BECAUSE)
    def of_tensor(own: Callable[..., int], self: torch.Tensor) -> int:
        if self.device.type != "xla":
            return own(self)
        offset = int(self.storage_offset()) * self.element_size()
        return self.untyped_storage().data_ptr() + offset


__all__ = ["aliased_inputs", "cpu_flags", "has_tpu_chips"]


def start() -> None:
    """Switches SPMD on, starts XLA on the CPU and mends kernels; does nothing the second time.

    Raises:
        SpmdZeroRuntimeError: a device was used before, without SPMD: torch_xla would then
            replicate existing tensors, or crash.
    """
    if not hasattr(torch, "xla"):
        # torch.utils.checkpoint looks for its device's module at torch.<device type>.
        torch._register_device_module("xla", _CheckpointDevice)
    if not xr.is_spmd():
        _use_spmd()
    start_as_torch_computes()
    mend()
    tell_storages_apart()
    memory_maps.bound_cache()
    take_over(device)
    take_over_generator(device)
    _autocast_lists.register("xla")


def _use_spmd() -> None:
    if _private.spmd_is_locked():
        raise SpmdZeroRuntimeError(
            "an XLA device was used before SPMD was switched on, and torch_xla can't switch later. "
            "Call spmdzero.init_distributed() (or spmdzero.initialize) before the first "
            "torch_xla.device() or tensor.to('xla') of the program"
        )
    xr.use_spmd()


class _CheckpointDevice:
    """The module in which torch.utils.checkpoint looks for a device and its random state.

    Draws inside the replica region derive from the CPU generator, which checkpoint restores, and
    from named states of it.
    """

    _initialized = True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device(_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def get_rng_state(_: Any = None) -> torch.Tensor:
        return _named_states.noted_on(torch.empty(0))

    @staticmethod
    def set_rng_state(state: torch.Tensor, _: Any = None) -> None:
        _named_states.put_back_of(state)


def device() -> torch.device:
    """The one virtual device that stands for all devices of the mesh."""
    start_as_torch_computes()
    return torch_xla.device()


def device_count() -> int:
    """Number of devices of all processes."""
    # Counting starts XLA, here and below, and scripts count before they initialize.
    start_as_torch_computes()
    return xr.global_runtime_device_count()


def local_device_count() -> int:
    """Number of devices that this process drives."""
    start_as_torch_computes()
    return xr.addressable_runtime_device_count()


def local_devices() -> list[str]:
    """Names of this process's devices, such as ``TPU:0``."""
    return _private.local_devices()


def process_count() -> int:
    """Number of processes, one per host."""
    start_as_torch_computes()
    return xr.process_count()


def process_index() -> int:
    """This process's index among all processes."""
    start_as_torch_computes()
    return xr.process_index()


def rendezvous() -> str:
    """The `init_method` of torch.distributed by which connected processes find each other."""
    # The import registers the URL's scheme.
    import torch_xla.distributed.xla_backend  # noqa: F401

    return "xla://"


def platform() -> str:
    """The devices' platform: ``"CPU"``, ``"TPU"``, ..."""
    return str(xr.device_type())


def program_platform() -> str:
    """The platform of the devices: nothing is traced here for others."""
    return platform()


def host_memory() -> bool:
    """No: torch_xla 2.9 keeps no buffer in the host's memory between programs."""
    return False


def program_torus() -> Torus | None:
    """The torus of the chips for which the current program is traced; None if not known."""
    if traced.torus is not None or platform() != "TPU":
        return traced.torus
    return torus_of(xr.global_runtime_device_attributes())


def sync() -> None:
    """Compiles the pending program, unless it is compiled, and starts it on the devices."""
    memory_maps.make_room()
    torch_xla.sync()


def wait() -> None:
    """Blocks until the devices have finished all started work."""
    xm.wait_device_ops()


def generator_state() -> int:
    """The state of the device's own generator, which `seed` sets."""
    return xm.get_rng_state()


def seed(value: int) -> None:
    """Seeds the device's own generator, which draws outside the replica region."""
    xm.set_rng_state(value)
