"""What torch_xla's metrics count: compile time, values that left the devices, CPU fallbacks."""

import torch_xla.debug.metrics as met


def compiled() -> tuple[int, float]:
    """Programs that this process has compiled, and the seconds that it has spent on that."""
    data = met.metric_data("CompileTime")
    return (data[0], data[1] / 1e9) if data else (0, 0.0)


def aliased_inputs() -> int:
    """Input buffers that the last compiled program reuses for its outputs (donation)."""
    data = met.metric_data("InputOutputAliasCount")
    return int(data[2][-1][1]) if data else 0


def host_reads() -> int:
    """Transfers from the devices to the host so far; each waits for what computes its value."""
    data = met.metric_data("TransferFromDeviceTime")
    return data[0] if data else 0


def fallbacks() -> dict[str, int]:
    """Operations that ran on the CPU for want of an XLA lowering, such as ``aten::i0``: calls."""
    names = (name for name in met.counter_names() if name.startswith("aten::"))
    return {name: calls for name in names if (calls := fallback_calls(name))}


def fallback_calls(operation: str) -> int:
    """How often one operation, such as ``aten::i0``, ran on the CPU so far."""
    # How torch_xla counts `.item()`, which has no other way.
    if operation == "aten::_local_scalar_dense":
        return 0
    return int(met.counter_value(operation) or 0)
