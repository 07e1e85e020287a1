"""torch FSDP2 whose parameters stay whole between forward and backward: its nearest to ZeRO-2."""

import torch
from harness.workload import CLIP, Block
from torch import nn
from torch.distributed.fsdp import fully_shard

from peers._ranks import ADAMW, RankPeer


class Peer(RankPeer):
    """One rank of `fully_shard(..., reshard_after_forward=False)`."""

    def place(self, model: nn.Module) -> None:
        """Shards each block, then what is left."""
        for part in model.modules():
            if isinstance(part, Block):
                fully_shard(part, reshard_after_forward=False)
        self._model = fully_shard(model, reshard_after_forward=False)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **ADAMW)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward, backward, clip, update."""
        loss = self._model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss
