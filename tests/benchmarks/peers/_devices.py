"""What the peers on devices of XLA's share."""

import torch
from harness.protocol import Peer
from harness.workload import Workload

from spmdzero.backend import counters, runtime


class DevicesPeer(Peer):
    """One process, whose devices another thread keeps busy."""

    def __init__(self, workload: Workload) -> None:
        runtime.start()
        if runtime.device_count() != workload.devices:
            raise RuntimeError(f"{runtime.device_count()} devices, not {workload.devices}")

    def read(self, loss: torch.Tensor) -> float:
        value = loss.item()
        runtime.wait()
        return value

    def programs(self) -> int:
        return counters.compiled()[0]


def peak_of_jax() -> int | None:
    """The most bytes of the first device in use at once, as JAX counts; None if it doesn't."""
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
