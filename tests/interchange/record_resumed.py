"""Writes tests/data/resumed.json by real DeepSpeed: `python -m tests.interchange.record_resumed`.

What a load leaves of a config that has changed since the checkpoint, what `load_module_only` within
a gradient accumulation leaves of its gradients, and which values a client state may hold.
"""

import argparse
import collections
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.deepspeed import run_ranks

ROOT = Path(__file__).parents[2]
OUT = ROOT / "tests" / "data" / "resumed.json"
RANKS = 2
SAVED = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}
CHANGED = {"lr": 5e-3, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "z0_fp32": {"zero_optimization": {"stage": 0}},
    "z0_bf16": {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
    "z1_fp32": {"zero_optimization": {"stage": 1}},
    "z1_bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "z2_fp16": {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}},
    "z1_fp32_schedule": {
        "zero_optimization": {"stage": 1},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    },
}
UNIVERSAL = "z1_fp32"
CLIENT_STATE: dict[str, Any] = {
    "np.float64": np.float64(0.5),
    "np.float32": np.float32(0.5),
    "np.int64": np.int64(5),
    "np.bool_": np.bool_(True),
    "np.ndarray": np.arange(3.0),
    "Path": Path("/somewhere/else"),
    "datetime": datetime.datetime(2026, 11, 26, 12, 30),
    "timedelta": datetime.timedelta(hours=1),
    "Namespace": argparse.Namespace(lr=0.1),
    "defaultdict": collections.defaultdict(list, a=[1]),
    "OrderedDict": collections.OrderedDict(a=1),
    "Counter": collections.Counter("aab"),
    "set": {1, 2},
    "dtype": torch.float32,
    "bytes": b"x",
    "complex": 1j,
}


def config_of(case: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A case's config; the classes of torch, whose numbers are all in the param groups."""
    return CASES[case] | {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": params | {"torch_adam": True}},
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        **more,
    }


class Model(torch.nn.Module):
    """A layer with a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x.to(self.layer.weight.dtype)).float() ** 2).mean()


def batch(seed: int) -> torch.Tensor:
    """`[2, 6]`, what each rank and each device gets."""
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(seed))


def numbers(engine: Any) -> dict[str, Any]:
    """Of the first param group what `SAVED` names."""
    group = engine.optimizer.param_groups[0]
    return {key: list(v) if isinstance(v := group[key], tuple) else v for key in SAVED}


def step(engine: Any, seed: int) -> None:
    engine.backward(engine(batch(seed)))
    engine.step()


def record_rank(folder: Path) -> dict[str, Any]:
    """What one rank of DeepSpeed sees."""
    import deepspeed

    def start(case: str, params: dict[str, Any], **more: Any) -> Any:
        model = Model()
        config = config_of(case, params, **more)
        return deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]

    seen: dict[str, Any] = {"numbers": {}}
    for case in CASES:
        engine = start(case, SAVED)
        step(engine, 0)
        engine.save_checkpoint(str(folder / case), tag="then")
        seen["numbers"][case] = resumed(start(case, CHANGED, gradient_clipping=0.25), folder / case)
    if deepspeed.comm.get_rank() == 0:
        source, target = folder / UNIVERSAL / "then", folder / UNIVERSAL / "then_universal"
        module = "deepspeed.checkpoint.ds_to_universal"
        words = ["--inject_missing_state"]
        words += ["--input_folder", str(source), "--output_folder", str(target)]
        own = {key: value for key, value in os.environ.items() if key != "RANK"}
        subprocess.run([sys.executable, "-m", module, *words], check=True, env=own, cwd=ROOT)
        (folder / UNIVERSAL / "latest_universal").write_text("then_universal")
    deepspeed.comm.barrier()
    engine = start(UNIVERSAL, CHANGED, gradient_clipping=0.25, checkpoint={"load_universal": True})
    seen["numbers"]["universal"] = resumed(engine, folder / UNIVERSAL, tag="then_universal")
    seen["module_only"] = {
        case: within_accumulation(start(case, SAVED, gradient_accumulation_steps=2), folder / case)
        for case in ("z0_fp32", "z1_fp32", "z2_fp16")
    }
    engine = start("z1_fp32", SAVED)
    engine.save_checkpoint(str(folder / "client"), tag="then", client_state=CLIENT_STATE)
    client_state = engine.load_checkpoint(str(folder / "client"), tag="then")[1]
    seen["client_state"] = {key: type(client_state[key]).__name__ for key in CLIENT_STATE}
    return seen


def resumed(engine: Any, folder: Path, tag: str = "then") -> dict[str, Any]:
    """The numbers after a load, and after the step that follows."""
    engine.load_checkpoint(str(folder), tag=tag)
    loaded = numbers(engine)
    step(engine, 1)
    clip = getattr(engine.optimizer, "clip_grad", engine.gradient_clipping())
    return {"loaded": loaded, "after a step": numbers(engine), "clips at": clip}


def within_accumulation(engine: Any, folder: Path) -> dict[str, Any]:
    """The step of two micro-batches between which `load_module_only` comes."""
    micro, steps = engine.micro_steps, engine.global_steps
    step(engine, 0)
    engine.load_checkpoint(str(folder), tag="then", load_module_only=True)
    step(engine, 1)
    norm = engine.get_global_grad_norm()
    return {
        "micro_steps": engine.micro_steps - micro,
        "global_steps": engine.global_steps - steps,
        "grad_norm": None if norm is None else float(norm),
    }


def rank(folder: str, result: str) -> None:
    """One rank; the first writes what it saw."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    torch.set_num_threads(1)
    # Whether fp16 is fast, is what DeepSpeed asks the CPU; torch computes it on any.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo")
    seen = record_rank(Path(folder))
    if deepspeed.comm.get_rank() == 0:
        Path(result).write_text(json.dumps(seen, indent=1) + "\n")
    deepspeed.comm.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Records, or is one of the ranks."""
    if len(sys.argv) > 1:
        rank(*sys.argv[1:])
        return
    with tempfile.TemporaryDirectory() as scratch:
        module = "tests.interchange.record_resumed"
        run_ranks(["-m", module, scratch, str(OUT)], ranks=RANKS, cwd=ROOT, timeout=600)


if __name__ == "__main__":
    main()
