"""spmdzero itself."""

from typing import Any

import torch
from harness.workload import Workload
from torch import nn

import spmdzero
from peers.config import deepspeed_config
from spmdzero.backend.torch_xla import runtime


class Peer:
    """The engine, called by `train_batch` or by the three calls."""

    rows = slice(None)
    host_is_apart = True

    def __init__(
        self, workload: Workload, *, stage: int, spmd: dict[str, Any], three_calls: bool = False
    ) -> None:
        self._config = deepspeed_config(workload, stage=stage) | {"spmd": spmd}
        self._three_calls = three_calls
        spmdzero.init_distributed()
        if runtime.device_count() != workload.devices:
            raise RuntimeError(f"{runtime.device_count()} devices, not {workload.devices}")

    def place(self, model: nn.Module) -> None:
        """`spmdzero.initialize`."""
        self._engine, *_ = spmdzero.initialize(model=model, config=self._config)
        runtime.wait()

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One step."""
        if not self._three_calls:
            return self._engine.train_batch(iter([(inputs, targets)]))
        loss = self._engine(inputs, targets)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def read(self, loss: torch.Tensor) -> float:
        """The loss, once the devices are done."""
        value = loss.item()
        runtime.wait()
        return value

    def programs(self) -> int:
        """Programs of this process."""
        return runtime.compile_count()

    def wire_bytes(self, inputs: torch.Tensor, targets: torch.Tensor) -> int:
        """By the ledger of the compiled step."""
        with spmdzero.record_ledgers(self._engine) as ledgers:
            self._engine.backward(self._engine(inputs, targets))
            self._engine.step()
        return ledgers.boundary.wire_bytes

    def close(self) -> None:
        """Nothing to end."""
