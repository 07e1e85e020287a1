"""Trains drawn cases in this process and writes their per-step numbers.

`python -m tests.oracle.worker cases.json result.json` is one DeepSpeed rank when RANK is set, else
spmdzero on `CPU_NUM_DEVICES` devices. All cases run in one process: starting one costs more than
training.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.oracle.draws import Case
from tests.oracle.model import ROWS, make_batch, make_model
from tests.oracle.peer import WORLD, Peer, this_process


def train(engine: Any, case: Case, *, rows: slice) -> list[dict[str, Any]]:
    """One record for each micro-batch, of what a script can ask an engine."""
    records = []
    for step in range(case.steps):
        for micro in range(engine.gradient_accumulation_steps()):
            lr_used = [float(lr) for lr in engine.get_lr()]
            loss = engine(*(tensor[rows] for tensor in make_batch(step, micro)))
            engine.backward(_scaled(loss, engine.optimizer))
            boundary = bool(engine.is_gradient_accumulation_boundary())
            engine.step()
            norm = engine.get_global_grad_norm()
            scale = _scale_without_zero(engine.optimizer)
            if scale is None:
                scale = getattr(engine.optimizer, "cur_scale", None)
            else:
                norm = None
            records.append(
                {
                    "step": step,
                    "micro": micro,
                    "loss": float(loss.detach()),
                    "grad_norm": None if norm is None else float(norm),
                    "loss_scale": None if scale is None else float(scale),
                    "lr_used": lr_used,
                    "lr": [float(lr) for lr in engine.get_lr()],
                    "mom": _plain(engine.get_mom()),
                    "boundary": boundary,
                    "applied": bool(engine.was_step_applied()),
                    "skipped_steps": engine.skipped_steps,
                    "global_steps": engine.global_steps,
                    "micro_steps": engine.micro_steps,
                    "global_samples": engine.global_samples,
                }
            )
    return records


def _scale_without_zero(optimizer: Any) -> float | None:
    """The loss scale of DeepSpeed's fp16 optimizers without ZeRO, None for any other."""
    config = getattr(optimizer, "loss_scale_config", None)
    return None if config is None else config.cur_scale


def _scaled(loss: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """The loss, multiplied as DeepSpeed's releases did before 0.19.8 left it out."""
    scale = _scale_without_zero(optimizer)
    return loss if scale is None else loss.float() * scale


def run(peer: Peer, case: Case, *, refusals: tuple[type[Exception], ...]) -> dict[str, Any]:
    """The case's records, or why the library refuses its config."""
    model = make_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case.frozen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: Any = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 4e-3},
    ]
    config = case.config | {"train_micro_batch_size_per_gpu": ROWS // WORLD}
    try:
        engine, *_ = peer.library.initialize(
            model=model,
            model_parameters=groups if case.groups else trained,
            config=json.loads(json.dumps(config)),
        )
    except refusals as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"records": train(engine, case, rows=peer.rows)}


def _plain(momentum: Any) -> Any:
    if isinstance(momentum, list | tuple):
        return [_plain(value) for value in momentum]
    return None if momentum is None else float(momentum)


def main() -> None:
    """Runs the cases of argv[1] and writes their results to argv[2]."""
    cases = [Case(**case) for case in json.loads(Path(sys.argv[1]).read_text())]
    peer = this_process()
    if peer.rank is None:
        refusals: tuple[type[Exception], ...] = (peer.library.SpmdZeroConfigError,)
        target = Path(sys.argv[2])
    else:
        # Whatever DeepSpeed raises while it reads a config is its refusal; it has no own class.
        refusals, target = (Exception,), Path(f"{sys.argv[2]}.{peer.rank}")
    results = {case.name: run(peer, case, refusals=refusals) for case in cases}
    target.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
