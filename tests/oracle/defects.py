"""Measures DeepSpeed's defects in live DeepSpeed, and the same things in spmdzero.

`python -m tests.oracle.defects` prints the table of docs/coming_from_deepspeed.md.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.oracle.model import ROWS, make_batch, make_model
from tests.oracle.peer import ROOT, WORLD, Peer, run_ours, this_process
from tests.support.deepspeed import run_ranks

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 1024}}

Values = dict[str, float | str]


class Bench:
    """Makes engines of one library and feeds them this process's rows."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def engine(self, *, stage: int, groups: bool = False, **config: Any) -> Any:
        model = make_model()
        parameters: Any = list(model.parameters())
        if groups:
            parameters = [
                {"params": [p for p in parameters if p.dim() > 1]},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
            ]
        settings = {
            "train_micro_batch_size_per_gpu": ROWS // WORLD,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        } | config
        return self.peer.library.initialize(
            model=model, model_parameters=parameters, config=settings
        )[0]

    def forward(self, engine: Any, step: int) -> torch.Tensor:
        return engine(*(tensor[self.peer.rows] for tensor in make_batch(step, 0)))


def two_losses(bench: Bench) -> Values:
    engine = bench.engine(stage=2)
    for micro_batch in (0, 1):
        engine.backward(bench.forward(engine, micro_batch))
    engine.step()
    return {
        "ZeRO-2, two `backward` for one `step`: gradient norm": float(engine.get_global_grad_norm())
    }


def bf16_at_stage_0(bench: Bench) -> Values:
    engine = bench.engine(stage=0, **BF16)
    for _ in range(2):
        loss = bench.forward(engine, 0)
        engine.backward(loss)
        engine.step()
    return {"stage 0, bf16: loss on the same rows after one AdamW step": loss.detach().item()}


def fp16_at_stage_0(bench: Bench) -> Values:
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    engine = bench.engine(stage=0, optimizer=sgd, **FP16)
    for _ in range(6):
        loss = bench.forward(engine, 0)
        engine.backward(loss)
        engine.step()
    return {"stage 0, fp16, loss scale 1024: loss after 5 steps of SGD": loss.detach().item()}


def states_of_two_groups(bench: Bench) -> Values:
    engine = bench.engine(stage=2, groups=True)
    engine.backward(bench.forward(engine, 0))
    engine.step()
    read = bench.peer.library.utils.safe_get_full_optimizer_state
    readable = 0
    for parameter in engine.module.parameters():
        # Each rank holds a part of some parameters; DeepSpeed raises on the ranks that hold one
        # without a state, and the others would wait for them in the collective.
        mapping = getattr(parameter, "_hp_mapping", None)
        missing = mapping is not None and not (mapping.optim_fragment or {})
        if not _any_rank(missing):
            readable += read(parameter, "exp_avg") is not None
    return {"two groups: of 9 parameters, states `safe_get_full_optimizer_state` reads": readable}


def shared_memory(bench: Bench) -> Values:
    port = os.environ.get("MASTER_PORT", "spmdzero")
    files = Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*")
    size = sum(file.stat().st_size for file in files) / WORLD / 1e6
    return {"MB of shared memory left after a run, for each rank": size}


def adagrad_with_two_groups(bench: Bench) -> Values:
    optimizer = {"type": "Adagrad", "params": {"lr": 0.01}}
    engine = bench.engine(stage=2, groups=True, optimizer=optimizer)
    loss = bench.forward(engine, 0)
    try:
        engine.backward(loss)
        engine.step()
        norm: float | str = float(engine.get_global_grad_norm())
    except IndexError:
        norm = "IndexError"
    return {"Adagrad, two groups: gradient norm": norm}


# The last one may leave DeepSpeed's ranks out of step.
MEASURES: list[Callable[[Bench], Values]] = [
    two_losses,
    bf16_at_stage_0,
    fp16_at_stage_0,
    states_of_two_groups,
    shared_memory,
    adagrad_with_two_groups,
]


def _any_rank(value: bool) -> bool:
    if "RANK" not in os.environ:
        return value
    flag = torch.tensor(float(value))
    torch.distributed.all_reduce(flag)
    return flag.item() > 0


def measure_all() -> None:
    """Prints the measures of the library that this process belongs to."""
    bench = Bench(this_process())
    print()
    values: Values = {}
    for measure in MEASURES:
        values |= measure(bench)
    print(json.dumps(values))


def compare() -> dict[str, tuple[float | str, float | str]]:
    """Measure -> (DeepSpeed's value, ours); a number of DeepSpeed is its ranks' mean."""
    arguments = ["-m", "tests.oracle.defects", "measure"]
    printed = run_ranks(arguments, ranks=WORLD, cwd=ROOT, timeout=600)
    ranks = [json.loads(text.splitlines()[-1]) for text in printed]
    ours = json.loads(run_ours(*arguments).splitlines()[-1])
    return {name: (_mean([rank[name] for rank in ranks]), ours[name]) for name in ours}


def _mean(values: list[Any]) -> float | str:
    return values[0] if isinstance(values[0], str) else sum(values) / len(values)


def _written(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure_all()
    else:
        print("| What | DeepSpeed | spmdzero |")
        print("|---|---|---|")
        for name, values in compare().items():
            print(f"| {name} | {_written(values[0])} | {_written(values[1])} |")
