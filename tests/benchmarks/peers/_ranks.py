"""What the peers with one process per rank share: gloo, the rows of a rank, the mean loss."""

import os

import torch
import torch.distributed as dist
from harness.protocol import Peer
from harness.workload import CLIP, LEARNING_RATE, ROWS, WEIGHT_DECAY, Workload
from torch import nn

ADAMW = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True}
"""torch.optim.AdamW at its fastest on a CPU."""


class RankPeer(Peer):
    """A rank of RANK, WORLD_SIZE, MASTER_PORT; its own thread does the arithmetic."""

    host_is_apart = False

    def __init__(self, workload: Workload) -> None:
        rank, rows = int(os.environ["RANK"]), ROWS // workload.devices
        self.rows = slice(rank * rows, (rank + 1) * rows)
        self._start()

    def _start(self) -> None:
        dist.init_process_group("gloo")

    def read(self, loss: torch.Tensor) -> float:
        """The mean over ranks, which is also the barrier before the next step."""
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    def close(self) -> None:
        dist.destroy_process_group()


class TorchPeer(RankPeer):
    """A rank whose `_model` and `_optimizer` are torch's own."""

    _model: nn.Module
    _optimizer: torch.optim.Optimizer

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self._model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss
