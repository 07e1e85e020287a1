"""Trains the contract's model and prints what the recordings hold: one JSON list on stdout.

Run as a module in a process of its own, because the device count is fixed for each process:
`CPU_NUM_DEVICES=2 python -m tests.support.trajectory '[{"config": {...}, "steps": 20}]'`
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.processes import run_module

ROOT = Path(__file__).resolve().parents[2]
Case = dict[str, Any]


def run(cases: list[Case], *, devices: int, flags: str | None = None) -> list[dict[str, Any]]:
    """Trains each case on that many devices, in one new process; `flags` replaces XLA_FLAGS."""
    variables = {} if flags is None else {"XLA_FLAGS": flags}
    printed = run_module(
        "tests.support.trajectory", json.dumps(cases), devices=devices, **variables
    )
    return json.loads(printed.splitlines()[-1])


def recording(name: str) -> dict[str, Any]:
    """A recorded DeepSpeed run."""
    return json.loads((ROOT / "tests" / "data" / f"{name}.json").read_text())


def case_of(name: str, **spmd: Any) -> Case:
    """The case that repeats a recording."""
    recorded = recording(name)
    config = recorded["ds_config"] | {"spmd": spmd}
    return {"config": config, "steps": recorded["steps"], "groups": name.endswith("groups")}


def train(case: Case) -> dict[str, Any]:
    """Per-step numbers of one case on this process's devices."""
    import spmdzero
    from spmdzero.backend import runtime
    from tests.support.contract import ROWS, make_batch, make_model

    runtime.start()
    config = case["config"] | {"train_micro_batch_size_per_gpu": ROWS // runtime.device_count()}
    model, groups = make_model(), None
    if case.get("groups"):
        flat = [p for p in model.parameters() if p.ndim < 2]
        wide = [p for p in model.parameters() if p.ndim >= 2]
        groups = [
            {"params": wide, "weight_decay": 0.1},
            {"params": flat, "weight_decay": 0.0, "lr": 2e-3},
        ]
    engine, *_ = spmdzero.initialize(model=model, model_parameters=groups, config=config)
    managed = config.get("managed_gradient_accumulation", True)
    records, trace = [], []
    for step in range(case["steps"]):
        lr_used, losses = engine.get_lr(), []
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(*make_batch(step, micro))
            engine.backward(loss)
            boundary = engine.is_gradient_accumulation_boundary()
            if managed or micro == engine.gradient_accumulation_steps() - 1:
                engine.step()
            losses.append(loss)
            trace.append(
                {
                    "step": step,
                    "g": micro,
                    "boundary_before_step": boundary,
                    "global_steps": engine.global_steps,
                    "micro_steps": engine.micro_steps,
                    "global_samples": engine.global_samples,
                    "skipped": engine.skipped_steps,
                    "was_step_applied": engine.was_step_applied(),
                    "grad_norm": engine.get_global_grad_norm(),
                    "lr": engine.get_lr(),
                }
            )
        losses = [loss.item() for loss in losses]
        records.append(
            {
                "step": step,
                "loss": sum(losses) / len(losses),
                "micro_losses": losses,
                "lr_used": lr_used,
                "lr_after": engine.get_lr(),
                "mom": engine.get_mom(),
                "grad_norm": engine.get_global_grad_norm(),
                "loss_scale_after": engine.cur_scale,
                "step_applied": engine.was_step_applied(),
                "skipped_steps": engine.skipped_steps,
                "global_steps": engine.global_steps,
            }
        )
    return {"records": records, "trace": trace}


if __name__ == "__main__":
    print(json.dumps([train(case) for case in json.loads(sys.argv[1])]))
