"""What torch_xla's metrics count: compile time, values that left the devices, CPU fallbacks."""

import torch_xla.debug.metrics as met


def compile_seconds() -> float:
    """Seconds that this process has spent on compiling."""
    data = met.metric_data("CompileTime")
    return data[1] / 1e9 if data else 0.0


def host_reads() -> int:
    """Transfers from the devices to the host so far; each waits for what computes its value."""
    data = met.metric_data("TransferFromDeviceTime")
    return data[0] if data else 0


def fallbacks() -> dict[str, int]:
    """Operations that ran on the CPU for want of an XLA lowering, such as ``aten::i0``: calls."""
    names = met.counter_names()
    return {name: int(met.counter_value(name)) for name in names if name.startswith("aten::")}
