"""A search of `spmdzero plan`, and beside it configs that were written by hand."""

import dataclasses
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from on_tpu.cases import CLIP, LEARNING_RATE, SIZES, WEIGHT_DECAY
from on_tpu.torch_models import batch_of, build
from spmdzero.config import set_keys, with_stand_ins
from spmdzero.explain import Topology, keeping_programs, trace_ahead
from spmdzero.search import plan_for

JSONS = Path(__file__).resolve().parent / "jsons"
OPEN = {
    "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
    "bf16": {"enabled": True},
    "gradient_clipping": CLIP,
}
"""What every config of docs/benchmarks.md says, and a search keeps."""
_ROWS = "train_micro_batch_size_per_gpu"
_NOT_KEPT = ("fp16", "scheduler", "train_batch_size", "gradient_accumulation_steps", _ROWS)


def measure(
    *,
    devices: int,
    size: str,
    case: str,
    topology: str,
    programs: int,
    cache: str,
    sizes: dict[str, int],
    by_hand: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Searches, then compiles the configs by hand.

    Args:
        devices: of the topology.
        size, case: of `on_tpu.cases`.
        topology: a slice.
        programs: the most that the search compiles.
        cache: a folder for compiled programs; the search finds it empty.
        sizes: fields of the case that differ in this search; none where the size is "tiny".
        by_hand: title -> a config: a file of `JSONS` or none, and dotted keys.
    """
    # transformers would import torch_xla where it is installed.
    os.environ["USE_TORCH_XLA"] = "false"
    what = dataclasses.replace(SIZES[size][case], **(sizes if size == "full" else {}))
    model, batch = build(what, fused_loss=True), batch_of(what, devices=devices)
    logging.getLogger("spmdzero").addHandler(logging.FileHandler(Path(cache, "log")))
    begin = time.monotonic()
    plan = plan_for(model, OPEN, batch, tpu=topology, programs=programs, cache=cache)
    minutes = (time.monotonic() - begin) / 60
    best = plan.best
    found = {
        "plan": str(plan), "minutes": minutes, "funnel": list(plan.funnel),
        "words": best and best.words, "seconds": best and best.seconds, "peak": best and best.peak,
        "calibrated": best and best.calibrated and str(best.calibrated),
    }  # fmt: skip
    seconds = {}
    for title, hand in by_hand.items():
        path = hand["json_of"] and JSONS / hand["json_of"]
        given = json.loads(path.read_text()) if path else {}
        # Of a file that a Trainer fills, what it leaves to the Trainer, and what no bf16 run has.
        given = {name: value for name, value in given.items() if name not in _NOT_KEPT}
        config, _ = with_stand_ins(set_keys({**given, **OPEN}, {_ROWS: what.rows, **hand["keys"]}))
        with keeping_programs(Path(cache)):
            told = trace_ahead(model, config, batch, Topology.parse(topology)).explained()
        seconds[title] = told.times[0].seconds if told.times else None
    return found | {"by_hand": seconds}
