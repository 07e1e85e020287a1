"""The devices' memory, as JAX knows it: see `spmdzero.backend.DeviceMemory`."""

from collections.abc import Sequence
from typing import Any

import jax
import torch

from spmdzero.backend.jax import runtime
from spmdzero.backend.jax.graph._options import of_devices
from spmdzero.backend.jax.lowering import lowered


def limit() -> int | None:
    """Bytes that programs may use on the device that has the fewest; None if nobody says."""
    runtime.start()
    told = [device.memory_stats() for device in jax.local_devices()]
    limits = [stats["bytes_limit"] for stats in told if stats and "bytes_limit" in stats]
    return min(limits, default=None)


def of_program(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Compiles the pending program that computes `tensors`, and starts nothing.

    Returns the bytes of its inputs on a device, and the most that are in use there at once, inputs
    included, as XLA's buffer assignment says.
    """
    stats = lowered(tensors).compile(compiler_options=of_devices()).memory_analysis()
    # The peak has inputs and outputs that rest in the host's memory.
    on_host = stats.host_argument_size_in_bytes
    on_host += stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
    return stats.argument_size_in_bytes, peak_of(stats) - on_host


def peak_of(stats: Any) -> int:
    """The most bytes that are in use at once, of what XLA says of a compiled program's memory.

    For CPUs jax 0.12 counts inputs and outputs in the peak, and no temporary values.
    """
    values = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    if jax.default_backend() != "cpu" or stats.peak_memory_in_bytes >= values:
        return stats.peak_memory_in_bytes
    return values + stats.output_size_in_bytes - stats.alias_size_in_bytes
