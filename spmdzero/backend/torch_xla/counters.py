"""Counts from torch_xla's metrics: compilations, transfers to the host, CPU fallbacks."""

import torch_xla.debug.metrics as met

from spmdzero.backend.torch_xla import memory_maps


def compiled() -> tuple[int, float]:
    """Number of compiled programs, and the seconds that compiling took; without `make_room`'s."""
    data = met.metric_data("CompileTime")
    return (data[0] - memory_maps.fillers(), data[1] / 1e9) if data else (0, 0.0)


def aliased_inputs() -> int:
    """Number of input buffers that the last compiled program reuses for outputs (donation)."""
    data = met.metric_data("InputOutputAliasCount")
    return int(data[2][-1][1]) if data else 0


def host_reads() -> int:
    """Number of transfers from the devices to the host; each waits for its value."""
    data = met.metric_data("TransferFromDeviceTime")
    return data[0] if data else 0


def fallbacks() -> dict[str, int]:
    """Calls per operation that ran on the CPU for want of a lowering, such as ``aten::i0``."""
    names = (name for name in met.counter_names() if name.startswith("aten::"))
    return {name: calls for name in names if (calls := fallback_calls(name))}


def fallback_calls(operation: str) -> int:
    """Number of calls of one operation, such as ``aten::i0``, that ran on the CPU."""
    # torch_xla counts `.item()` under this name, which has no other way.
    if operation == "aten::_local_scalar_dense":
        return 0
    return int(met.counter_value(operation) or 0)
