"""torch FSDP2 whose parameters stay whole between forward and backward: its nearest to ZeRO-2."""

import torch
from harness.workload import Block
from torch import nn
from torch.distributed.fsdp import fully_shard

from peers._ranks import ADAMW, TorchPeer


class Peer(TorchPeer):
    """One rank of `fully_shard(..., reshard_after_forward=False)`."""

    def place(self, model: nn.Module) -> None:
        for part in model.modules():
            if isinstance(part, Block):
                fully_shard(part, reshard_after_forward=False)
        self._model = fully_shard(model, reshard_after_forward=False)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **ADAMW)
