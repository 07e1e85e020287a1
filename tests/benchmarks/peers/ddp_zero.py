"""torch DDP with ZeroRedundancyOptimizer: ZeRO-1."""

import torch
from harness.workload import CLIP
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from peers._ranks import ADAMW, RankPeer


class Peer(RankPeer):
    """One rank of DDP."""

    def place(self, model: nn.Module) -> None:
        """Wraps the model and its optimizer."""
        self._model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._optimizer = ZeroRedundancyOptimizer(
            self._model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            **ADAMW,
        )

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward, backward, clip, update."""
        loss = self._model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss
