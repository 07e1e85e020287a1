"""One rank of real DeepSpeed: loads, trains, saves; rank 0 writes the losses.

`python -m tests.interchange.deepspeed_rank order.json losses.json`, where the order is a list of
``{"case": name, "ranks": n, "start": step, "steps": n, "load": folder or None,
"save": folder or None, "universal": bool}``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator

from tests.interchange.cases import CASES, CLIENT_STATE, LIVE, config_of, model_of, run_order
from tests.oracle.model import ROWS


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Trains from `start`, or from the checkpoint; what a script sees of it."""
    case, rank, ranks = (CASES | LIVE)[order["case"]], comm.get_rank(), comm.get_world_size()
    # Ranks that share a row's work come one after the other.
    mine, replicas = rank // case["tp"], ranks // case["tp"]
    rows = slice(mine * ROWS // replicas, (mine + 1) * ROWS // replicas)
    model, groups = model_of(case)
    config = config_of(case, ranks=ranks, stage=order["stage"])
    if order["universal"]:
        config["checkpoint"] = {"load_universal": True}
    if order["load"]:
        for parameter in model.parameters():
            # From a universal checkpoint DeepSpeed loads what it trains, and nothing else.
            if parameter.requires_grad or not order["universal"]:
                torch.nn.init.normal_(parameter)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    seen = run_order(
        engine,
        order,
        rows,
        lambda: engine.save_checkpoint(order["save"], client_state=CLIENT_STATE),
    )
    for index, loss in enumerate(seen["losses"]):
        total = loss.double()
        comm.all_reduce(total)
        seen["losses"][index] = total.item() / ranks
    return seen


def main() -> None:
    """Runs the orders of argv[1]; rank 0 writes what they saw to argv[2]."""
    torch.set_num_threads(1)
    # Whether fp16 is fast, is what DeepSpeed asks the CPU; torch computes it on any.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo")
    results = [run(order) for order in json.loads(Path(sys.argv[1]).read_text())]
    if comm.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    comm.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
