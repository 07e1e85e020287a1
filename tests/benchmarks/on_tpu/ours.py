"""spmdzero's own step: `explain` traces it, and here is kept what it would compile."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

import spmdzero
from on_tpu import folder
from on_tpu.cases import CLIP, LEARNING_RATE, SIZES, WEIGHT_DECAY
from on_tpu.torch_models import batch_of, build
from spmdzero.config._spmd import SpmdConfig
from spmdzero.explain import WaitingError, _passes


def measure(
    *,
    devices: int,
    root: str,
    size: str,
    case: str,
    options: dict[str, Any],
    requests: dict[str, Any],
) -> dict[str, Any]:
    """Traces the step and keeps its programs; `{"lacks": ...}` where this version has no such.

    How they are compiled is `explain`'s to say; of `requests` the environment is kept.
    """
    what = SIZES[size][case]
    spmd = options.get("spmd", {})
    lacks = [key for key in spmd if key not in SpmdConfig.model_fields]
    if lacks:
        return dict.fromkeys(requests, {"lacks": f"spmd.{lacks[0]}"})
    model = build(what, fused_loss=options.get("loss", "fused") == "fused")
    config = {
        "train_micro_batch_size_per_gpu": what.rows,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "spmd": spmd,
    }
    return {
        topology: _traced(
            Path(root), model, config, what, topology, devices, request["environment"]
        )
        for topology, request in requests.items()
    }


def _traced(root, model, config, what, topology, devices, environment) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[_passes.FOLDER] = scratch
        try:
            batch = batch_of(what, devices=devices)
            spmdzero.explain(model, config, batch, tpu=[topology], stages=(2,))
        except WaitingError:
            pass
        paths = sorted(Path(scratch).iterdir())
        return {"programs": [_kept(root, path, environment) for path in paths]}


def _kept(root: Path, ordered: Path, environment: dict[str, str]) -> str:
    request = json.loads((ordered / "request").read_text())
    # The paths of this machine.
    del request["proto"], request["hlo"]
    request["environment"] = environment
    return folder.keep_program(root, (ordered / "proto").read_bytes(), request)
