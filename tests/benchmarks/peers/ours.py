"""spmdzero itself."""

from typing import Any

import torch
from harness.workload import Workload
from torch import nn

import spmdzero
from peers._devices import DevicesPeer, peak_of_jax
from peers.config import deepspeed_config
from spmdzero.backend import current, runtime


class Peer(DevicesPeer):
    """The engine, called by `train_batch` or by the three calls."""

    def __init__(
        self, workload: Workload, *, stage: int, spmd: dict[str, Any], three_calls: bool = False
    ) -> None:
        super().__init__(workload)
        self._config = deepspeed_config(workload, stage=stage) | {"spmd": spmd}
        self._three_calls = three_calls

    def place(self, model: nn.Module) -> None:
        self._engine, *_ = spmdzero.initialize(model=model, config=self._config)
        runtime.wait()

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not self._three_calls:
            return self._engine.train_batch(iter([(inputs, targets)]))
        loss = self._engine(inputs, targets)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def peak_memory(self) -> int | None:
        return peak_of_jax() if current().name == "jax" else None

    def wire_bytes(self, inputs: torch.Tensor, targets: torch.Tensor) -> int:
        with spmdzero.record_ledgers(self._engine) as ledgers:
            self._engine.backward(self._engine(inputs, targets))
            self._engine.step()
        return ledgers.boundary.wire_bytes
