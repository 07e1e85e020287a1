"""Resumes, trains and saves; something happens to one host meanwhile.

`python -m tests.hosts.faulty PLAN`, whose JSON says:

    folder: of the checkpoints; tag: which of them to load, the latest where it is null.
    log: a file, which gets a line of JSON for what the first host has come to.
    end: how many steps the run has; goal: how many this start makes at most.
    kind, moment, host: what happens, when, and to which host; nothing where kind is null.
    share: at which part of the moment, from 0 to 1.
    stage: of ZeRO, whose parameters all rest as shards at 3.
    offload: whether masters and moments rest in the host's memory.
"""

import contextlib
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import spmdzero
from spmdzero.backend import runtime
from spmdzero.backend.hosts import processes
from tests.checkpoint.files import interrupted
from tests.hosts.harming import HARMS

EVERY = 3
"""Steps from one checkpoint to the next."""
TIMEOUT = 4.0
"""Of `"spmd"`, in seconds: more than a slow host takes, and than a busy machine."""
JOINING = datetime.timedelta(seconds=8)
ROWS, WIDTH = 8, 8
# How long each moment takes, about, in seconds.
LENGTHS = {"connecting": 1.5, "training": 0.1, "loading": 0.3}
# How many file operations a save has, about.
OPERATIONS = 30


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.head(torch.tanh(self.body(x))).squeeze(-1), x.sum(1))


class Fault:
    """What happens to this host, at its moment: in its main thread, or beside it."""

    def __init__(self, plan: dict[str, Any]) -> None:
        # The launcher's variable: the device runtime isn't asked before it is started.
        mine = os.environ["RANK"] == str(plan["host"])
        self.kind, self.moment = plan["kind"] if mine else None, plan["moment"]
        self.share = plan["share"]

    def strike(self) -> None:
        """Has it happen, once."""
        kind, self.kind = self.kind, None
        if kind:
            HARMS[kind]()

    @contextlib.contextmanager
    def inside(self, moment: str) -> Iterator[None]:
        """Has it happen in the body, if that is its moment."""
        if moment != self.moment or not self.kind:
            yield
        elif moment == "saving":
            with interrupted(self._before_operation):
                yield
            self.strike()
        elif moment == "starting" or self.kind in ("fails", "slow"):
            self.strike()
            yield
        else:
            threading.Timer(self.share * LENGTHS[moment], self.strike).start()
            yield

    def _before_operation(self, count: int, _: str) -> None:
        if count >= self.share * OPERATIONS:
            self.strike()


def engine_of(plan: dict[str, Any]) -> spmdzero.Engine:
    torch.manual_seed(0)
    rest = "cpu" if plan["offload"] else "none"
    config = {
        "train_batch_size": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": plan["stage"],
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": rest},
        },
        "spmd": {"timeout": TIMEOUT, "min_shard_elements": 16},
    }
    return spmdzero.initialize(model=Model(), config=config)[0]


def rows(step: int) -> torch.Tensor:
    """This host's rows of a step."""
    whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return whole.chunk(runtime.process_count())[runtime.process_index()]


def main() -> None:
    plan = json.loads(sys.argv[1])
    fault = Fault(plan)
    with fault.inside("starting"):
        pass
    # As `initialize` does, which would wait ten minutes for the others.
    processes.watch_with(timeout=TIMEOUT)
    with fault.inside("connecting"):
        spmdzero.init_distributed(timeout=JOINING)
        engine = engine_of(plan)
    with open(plan["log"], "a") as log:

        def note(**said: Any) -> None:
            if runtime.process_index() == 0:
                print(json.dumps(said), file=log, flush=True)

        with fault.inside("loading"):
            engine.load_checkpoint(plan["folder"], tag=plan["tag"])
        note(resumed=engine.global_steps)
        goal = min(plan["end"], engine.global_steps + plan["goal"])
        unlucky = engine.global_steps + int(plan["share"] * EVERY)
        while engine.global_steps < goal:
            step = engine.global_steps
            moment = "training" if step >= unlucky else "waiting for it"
            with fault.inside(moment):
                loss = engine.train_batch(iter([rows(step)])).item()
            note(step=step, loss=loss)
            if engine.global_steps % EVERY == 0:
                with fault.inside("saving"):
                    engine.save_checkpoint(plan["folder"])
                note(saved=engine.global_steps)
        # What happens beside may come later than the goal; the others wait for it.
        while fault.kind:
            time.sleep(0.05)
        spmdzero.comm.barrier()
        note(done=True)


if __name__ == "__main__":
    main()
