"""torch DDP with ZeroRedundancyOptimizer: ZeRO-1."""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from peers._ranks import ADAMW, TorchPeer


class Peer(TorchPeer):
    """One rank of DDP."""

    def place(self, model: nn.Module) -> None:
        self._model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._optimizer = ZeroRedundancyOptimizer(
            self._model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            **ADAMW,
        )
