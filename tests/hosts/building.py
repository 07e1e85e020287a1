"""Builds a model inside of `zero.Init` and trains a step; prints what it is and what it lost.

`python -m tests.hosts.building`: one host of some, each with a seed of its own.
"""

import json

import torch
from torch import nn

import spmdzero
from spmdzero import zero
from spmdzero.backend import arrays, runtime
from tests.hosts.cases import ALL_SHARDS

CONFIG = ALL_SHARDS | {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "spmd": {"backend": "jax", "min_shard_elements": 512},
}


def main() -> None:
    spmdzero.init_distributed()
    torch.manual_seed(runtime.process_index())
    with zero.Init(config_dict_or_path=CONFIG):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    split = [arrays.is_split(parameter) for parameter in model.parameters()]
    with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        sums = [parameter.sum().item() for parameter in model.parameters()]
    engine, *_ = spmdzero.initialize(model=model, config=CONFIG)
    losses = []
    for _ in range(2):
        loss = engine(torch.ones(runtime.local_device_count(), 64)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print(json.dumps({"split": split, "sums": sums, "losses": losses}))


if __name__ == "__main__":
    main()
