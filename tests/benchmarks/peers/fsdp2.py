"""torch FSDP2, ZeRO-3; or its nearest to ZeRO-2: parameters stay whole until their backward."""

import torch
from harness.workload import Block, Workload
from torch import nn
from torch.distributed.fsdp import fully_shard

from peers._ranks import ADAMW, TorchPeer


class Peer(TorchPeer):
    """One rank of `fully_shard`.

    Args:
        workload: what is trained.
        reshard: free the whole parameters after their forward, and gather them again.
    """

    def __init__(self, workload: Workload, *, reshard: bool = False) -> None:
        self._reshard = reshard
        super().__init__(workload)

    def place(self, model: nn.Module) -> None:
        for part in model.modules():
            if isinstance(part, Block):
                fully_shard(part, reshard_after_forward=self._reshard)
        self._model = fully_shard(model, reshard_after_forward=self._reshard)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **ADAMW)
