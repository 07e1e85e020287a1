"""Trains a model whose forward gathers the rows of all hosts' devices; prints its losses."""

import json
import sys
from typing import Any

import torch.distributed as dist
from torch import nn

import spmdzero
from tests.comm.trained_in_forward import ADAM, MICRO, Towers, batches


def main(forward: str, devices: int) -> None:
    spmdzero.init_distributed()
    # In a forward it is the number of devices.
    hosts = dist.get_world_size()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": 2},
        "spmd": {"forward": forward},
    }
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Towers(whole=False, norm=True))
    engine, *_ = spmdzero.initialize(model=model, config=config)
    rows = devices * MICRO // hosts
    own = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    losses = []
    for x, y in batches(devices, 1):
        try:
            loss = engine(x[own], y[own])
        except spmdzero.ReplicaRegionError as refused:
            print(json.dumps(str(refused)))
            return
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
