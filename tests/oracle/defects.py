"""Measures DeepSpeed's defects in live DeepSpeed, and the same things in spmdzero.

`python -m tests.oracle.defects` prints the table of docs/coming_from_deepspeed.md.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.oracle.model import ROWS, make_batch, make_model
from tests.oracle.peer import WORLD, Peer, this_process
from tests.support.deepspeed import run_ranks
from tests.support.processes import environment

ROOT = Path(__file__).parents[2]
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 1024}}
STATIC_SCALE_STEPS = 5

Values = dict[str, float]


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


def two_backwards(bench: Bench) -> Values:
    """Norm of the gradient after two losses were differentiated for one step."""
    engine = bench.engine(stage=2)
    for micro_batch in (0, 1):
        engine.backward(bench.forward(engine, micro_batch))
    engine.step()
    return {"norm": float(engine.get_global_grad_norm())}


def first_step_in_bf16(bench: Bench) -> Values:
    """The loss on the same rows after one step at stage 0."""
    engine = bench.engine(stage=0, **BF16)
    for _ in range(2):
        loss = bench.forward(engine, 0)
        engine.backward(loss)
        engine.step()
    return {"loss after a step": float(loss.detach())}


def static_scale_at_stage_0(bench: Bench) -> Values:
    """The first step's norm under a loss scale of 1024, and where plain SGD arrives."""
    engine = bench.engine(stage=0, optimizer={"type": "SGD", "params": {"lr": 0.5}}, **FP16)
    norms = []
    for _ in range(STATIC_SCALE_STEPS + 1):
        loss = bench.forward(engine, 0)
        engine.backward(loss)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return {"norm": norms[0], f"loss after {STATIC_SCALE_STEPS} steps": float(loss.detach())}


def second_group_states(bench: Bench) -> Values:
    """How many parameters' optimizer states a script can read when there are two groups."""
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
    return {"readable of 9 parameters": readable}


MEASURES: dict[str, Callable[[Bench], Values]] = {
    measure.__name__: measure
    for measure in (two_backwards, first_step_in_bf16, static_scale_at_stage_0, second_group_states)
}


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
    print(json.dumps({name: measure(bench) for name, measure in MEASURES.items()}))


def compare() -> dict[str, tuple[Values, Values]]:
    """Measure -> (DeepSpeed's values, ours); a loss of DeepSpeed is its ranks' mean."""
    arguments = ["-m", "tests.oracle.defects", "measure"]
    printed = run_ranks(arguments, ranks=WORLD, cwd=ROOT, timeout=600)
    ranks = [json.loads(text.splitlines()[-1]) for text in printed]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(WORLD), XLA_FLAGS=""),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ours = json.loads(done.stdout.splitlines()[-1])
    return {
        name: (
            {
                key: sum(rank[name][key] for rank in ranks) / WORLD
                for key in ours[name]
            },
            ours[name],
        )
        for name in MEASURES
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure_all()
    else:
        for name, (theirs, ours) in compare().items():
            for key in ours:
                print(f"| {name} | {key} | {theirs[key]:.4g} | {ours[key]:.4g} |")
