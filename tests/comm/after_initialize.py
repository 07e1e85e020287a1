"""What a lone process asks torch.distributed after `initialize`; prints it as JSON.

Run by test_comm.py, with ``users`` in a group of the script's own.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import spmdzero
from tests.comm.newest_names import gather_single, scatter_single
from tests.support.processes import free_port

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
}


def collectives(device: torch.device) -> dict[str, list[float]]:
    own = torch.arange(1.0, 3.0).to(device)
    listed, whole, part = [torch.zeros_like(own)], torch.zeros_like(own), torch.zeros_like(own)
    summed, mean = own.clone(), own.clone()
    dist.all_gather(listed, own)
    gather_single(whole, own)
    scatter_single(part, own)
    dist.all_reduce(summed)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    dist.broadcast(own, src=0)
    found = {"all_gather": listed[0], "into": whole, "scattered": part, "summed": summed}
    return {name: value.tolist() for name, value in {**found, "mean": mean, "own": own}.items()}


def main() -> None:
    before = dict(os.environ)
    if "users" in sys.argv:
        there = f"tcp://127.0.0.1:{free_port()}"
        dist.init_process_group("gloo", init_method=there, rank=0, world_size=1)
    users = dist.group.WORLD
    engine, *_ = spmdzero.initialize(model=nn.Linear(2, 2), config=CONFIG)
    dist.barrier()
    found = {
        "place": [dist.get_rank(), dist.get_world_size(), dist.get_backend()],
        "users": users is None or dist.group.WORLD is users,
        "collectives": collectives(engine.device),
        "environment": [n for n in ("RANK", "WORLD_SIZE") if os.environ.get(n) != before.get(n)],
    }
    if "users" in sys.argv:
        dist.destroy_process_group()
        found["step after it"] = engine(torch.ones(engine.dp_world_size, 2)).sum().item() != 0
    print(json.dumps(found))


if __name__ == "__main__":
    main()
