"""What the peers on torch_xla's virtual devices share."""

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
