"""The accelerator of `get_accelerator()`, which describes the devices of this host."""

import contextlib
import os
import resource
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from spmdzero.backend import arrays, current, programs, runtime
from spmdzero.compat.refusals import refused_methods
from spmdzero.errors import SpmdZeroUsageError

if TYPE_CHECKING:
    _Refused = object
else:
    _Refused = refused_methods("accelerator.DeepSpeedAccelerator")


def _answer(value: Any, why: str) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return value

    method.__doc__ = f"{value!r}. {why}"
    return method


class XlaAccelerator(_Refused):
    """DeepSpeed's accelerator interface over the XLA devices of this host.

    One process drives all devices, through one virtual device: `device_count()` counts the real
    devices, `device_name()` and `current_device_name()` name the virtual one. `device_index` is
    accepted and ignored.
    """

    def __init__(self) -> None:
        self._ranges: list[contextlib.ExitStack] = []
        self._peak = 0

    # -- fixed answers, each with its reason -----------------------------------------------

    is_available = _answer(True, "There is always one.")
    is_synchronized_device = _answer(False, "A step runs while Python goes on.")
    use_host_timers = _answer(
        True, "There are no device events; synchronise before reading a timer."
    )
    resolves_data_dependency = _answer(True, "XLA orders what depends on each other.")
    handles_memory_backpressure = _answer(
        True, "A compiled program's memory is known before it runs."
    )
    communication_backend_name = _answer(
        "gloo", "It connects processes; devices are connected by XLA."
    )
    is_bf16_supported = _answer(True, "A config may train in it.")
    is_fp16_supported = _answer(True, "A config may train in it.")
    is_triton_supported = _answer(False, "XLA compiles the kernels.")
    prefer_triton_grouped_mm = _answer(False, "XLA compiles the kernels.")

    # -- devices ---------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """The type of the virtual device, ``"xla"``, to which tensors are moved."""
        return self._device().type

    def current_device_name(self) -> str:
        """The name of the virtual device, ``"xla:0"``."""
        return str(self._device())

    def current_device(self) -> int:
        """0, which `tensor.to`, `module.to` and `torch.tensor` accept as the virtual device."""
        runtime.start()
        return 0

    def device_count(self) -> int:
        """Number of devices of this host."""
        runtime.start()
        return runtime.local_device_count()

    def device(self, device_index: int | None = None) -> contextlib.AbstractContextManager[None]:
        """A context that does nothing: there is one virtual device."""
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        """Does nothing but start the runtime: this process drives all devices of its host."""
        # From here on scripts pass the local rank to torch.
        runtime.start()

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits until the devices have finished all started programs."""
        runtime.start()
        runtime.wait()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is on the devices."""
        return arrays.is_mine(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """False: XLA copies from ordinary host memory."""
        return False

    def empty_cache(self) -> None:
        """Does nothing: XLA frees a buffer when its tensor dies."""

    # -- dtypes ----------------------------------------------------------------------------

    def is_fp64_supported(self) -> bool:
        """Whether the devices compute in float64, as only CPU devices do."""
        runtime.start()
        return runtime.platform() == "CPU"

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that a config can train in."""
        return [torch.float32, torch.float16, torch.bfloat16]

    BFloat16Tensor = property(lambda self: self._tensor(torch.bfloat16))
    ByteTensor = property(lambda self: self._tensor(torch.uint8))
    DoubleTensor = property(lambda self: self._tensor(torch.float64))
    FloatTensor = property(lambda self: self._tensor(torch.float32))
    HalfTensor = property(lambda self: self._tensor(torch.float16))
    IntTensor = property(lambda self: self._tensor(torch.int32))
    LongTensor = property(lambda self: self._tensor(torch.int64))

    # -- random numbers: devices draw from the CPU generator's seed ------------------------

    def random(self) -> Any:
        """The `torch.random` module."""
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        """Calls `torch.manual_seed`."""
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """Calls `torch.initial_seed`."""
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Calls `torch.get_rng_state`."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Calls `torch.set_rng_state`."""
        torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        """Returns `torch.default_generator`."""
        return torch.default_generator

    # -- memory ----------------------------------------------------------------------------

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use by this process, as in DeepSpeed's CPU accelerator.

        Raises:
            SpmdZeroUsageError: the devices have memory of their own, whose use is not reported.
        """
        runtime.start()
        if runtime.platform() != "CPU":
            raise SpmdZeroUsageError(
                f"{current().name} reports no memory use under SPMD. Use spmdzero.measure(engine) "
                "for live bytes per device, and engine.plan.memory() for the plan"
            )
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[1]) * resource.getpagesize()
        self._peak = max(self._peak, used)
        return used

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Largest value that `memory_allocated` has returned; raises as `memory_allocated`."""
        self.memory_allocated()
        return self._peak

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Resets `max_memory_allocated` to zero."""
        self._peak = 0

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Current and peak bytes, by torch.cuda's names."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the host's memory; raises as `memory_allocated`."""
        self.memory_allocated()
        return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of the host's free memory; raises as `memory_allocated`."""
        self.memory_allocated()
        return os.sysconf("SC_AVPHYS_PAGES") * resource.getpagesize()

    memory_reserved = memory_cached = memory_allocated
    max_memory_reserved = max_memory_cached = max_memory_allocated
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    # -- the rest --------------------------------------------------------------------------

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Names the operations until `range_pop` in the compiled program's metadata."""
        stack = contextlib.ExitStack()
        stack.enter_context(programs.scope(msg))
        self._ranges.append(stack)

    def range_pop(self, domain: Any = None) -> None:
        """Ends the latest `range_push`."""
        if self._ranges:
            self._ranges.pop().close()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls `callback`, and returns its result."""
        return callback()

    def export_envs(self) -> list[str]:
        """Prefixes of the environment variables that a launcher passes on."""
        return ["PJRT_", "XLA_", "LIBTPU", "TPU_"]

    def _device(self) -> torch.device:
        runtime.start()
        return runtime.device()

    def _tensor(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        def make(*args: Any) -> torch.Tensor:
            if len(args) == 1 and not isinstance(args[0], int):
                return torch.tensor(args[0], dtype=dtype).to(self._device())
            return torch.empty(*args, dtype=dtype).to(self._device())

        return make


_ACCELERATOR = XlaAccelerator()


def get_accelerator() -> XlaAccelerator:
    """The only accelerator of this process."""
    return _ACCELERATOR
