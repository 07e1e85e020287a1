"""Real DeepSpeed, on gloo or on GPUs."""

import deepspeed  # pyrefly: ignore[missing-import]
import torch
from harness.workload import Workload
from torch import nn

from peers._ranks import RankPeer
from peers.config import deepspeed_config


class Peer(RankPeer):
    """One rank of DeepSpeed's engine; `compiled` has torch.compile take the module."""

    def __init__(self, workload: Workload, *, stage: int, compiled: bool = False) -> None:
        self._on_gpus = deepspeed.get_accelerator().device_name() == "cuda"
        self._config = deepspeed_config(workload, stage=stage, fused=self._on_gpus)
        self._compiled = compiled
        super().__init__(workload)

    def _start(self) -> None:
        deepspeed.init_distributed(dist_backend="nccl" if self._on_gpus else "gloo")

    def place(self, model: nn.Module) -> None:
        self._engine, *_ = deepspeed.initialize(model=model, config=self._config)
        if self._compiled:
            self._engine.compile()

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        device = self._engine.device
        loss = self._engine(inputs.to(device), targets.to(device))
        self._engine.backward(loss)
        self._engine.step()
        return loss

    def peak_memory(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self._on_gpus else None
