"""spmdzero's own step: `explain` traces it, and here is kept what it would compile."""

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import spmdzero
from on_tpu import folder
from on_tpu.cases import CLIP, LEARNING_RATE, SIZES, WEIGHT_DECAY, Case
from on_tpu.torch_models import batch_of, build
from spmdzero.explain import WaitingError, _passes

TRAINED = {
    "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
    "bf16": {"enabled": True},
    "gradient_clipping": CLIP,
}
"""What every config says."""


def config_of(case: Case, options: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a row with these options."""
    return {
        **TRAINED,
        "optimizer": {**TRAINED["optimizer"], **options.get("optimizer", {})},
        "train_micro_batch_size_per_gpu": case.rows,
        "zero_optimization": {"stage": case.stage},
        "spmd": {
            "xla_flags": "none",
            "recompute": "everything" if case.recompute else "nothing",
            **({"fused_loss": True} if case.untied else {}),
            **options.get("spmd", {}),
        },
    }


def measure(
    *,
    devices: int,
    root: str,
    size: str,
    case: str,
    options: dict[str, Any],
    requests: dict[str, Any],
) -> dict[str, Any]:
    """Traces the step for each topology and keeps its programs.

    How they are compiled is `explain`'s to say: of `requests` the environment is kept.
    """
    # transformers would import torch_xla where it is installed.
    os.environ["USE_TORCH_XLA"] = "false"
    what = SIZES[size][case]
    model = build(what, fused_loss=options.get("loss", "fused") == "fused")
    batch = batch_of(what, devices=devices)
    config = config_of(what, options)
    found = {}
    for topology, request in requests.items():
        with tempfile.TemporaryDirectory() as scratch:
            os.environ[_passes.FOLDER] = scratch
            with contextlib.suppress(WaitingError):
                spmdzero.explain(model, config, batch, tpu=[topology], stages=(what.stage,))
            ordered = sorted(Path(scratch).iterdir())
            kept = [_kept(Path(root), program, request["environment"]) for program in ordered]
        found[topology] = {"programs": kept}
    return found


def _kept(root: Path, ordered: Path, environment: dict[str, str]) -> str:
    request = json.loads((ordered / "request").read_text())
    # The paths of this machine.
    del request["module"], request["hlo"]
    request["environment"] = environment
    return folder.keep_program(root, (ordered / "module").read_bytes(), request)
