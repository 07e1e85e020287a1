"""A search of `spmdzero plan`, and beside it configs that were written by hand."""

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from on_tpu.cases import ROWS, SIZES, Case
from on_tpu.ours import TRAINED, config_of
from on_tpu.torch_models import batch_of, build
from spmdzero.config import with_stand_ins
from spmdzero.explain import Topology, keeping_programs, trace_ahead
from spmdzero.search import plan_for

JSONS = Path(__file__).resolve().parent / "jsons"
# Of a file that a Trainer fills, what it leaves to the Trainer, and what no bf16 run has.
_NOT_KEPT = ("fp16", "scheduler", "train_batch_size", "gradient_accumulation_steps")


def measure(
    *,
    devices: int,
    size: str,
    case: str,
    topology: str,
    programs: int,
    cache: str,
    by_hand: dict[str, str],
) -> dict[str, Any]:
    """Searches, then compiles the configs by hand.

    Args:
        devices: of the topology.
        size, case: of `on_tpu.cases`.
        topology: a slice.
        programs: the most that the search compiles.
        cache: a folder for compiled programs; the search finds it empty.
        by_hand: title -> a config: a row of `on_tpu.cases.ROWS`, or a file of `JSONS`.
    """
    # transformers would import torch_xla where it is installed.
    os.environ["USE_TORCH_XLA"] = "false"
    what = SIZES[size][case]
    model, batch = build(what, fused_loss=True), batch_of(what, devices=devices)
    logging.getLogger("spmdzero").addHandler(logging.FileHandler(Path(cache, "log")))
    begin = time.monotonic()
    plan = plan_for(model, TRAINED, batch, tpu=topology, programs=programs, cache=cache)
    minutes = (time.monotonic() - begin) / 60
    best = plan.best
    found = {
        "plan": str(plan), "minutes": minutes, "words": best and best.words,
        "seconds": best and best.seconds, "peak": best and best.peak,
    }  # fmt: skip
    seconds = {}
    for title, written in by_hand.items():
        row = ROWS.get(written)
        config = _adapted(JSONS / written, what) if row is None else config_of(what, row.options)
        with keeping_programs(Path(cache)):
            told = trace_ahead(model, config, batch, Topology.parse(topology)).explained()
        seconds[title] = told.times[0].seconds if told.times else None
    return found | {"by_hand": seconds}


def _adapted(path: Path, case: Case) -> dict[str, Any]:
    given = json.loads(path.read_text())
    kept = {name: value for name, value in given.items() if name not in _NOT_KEPT}
    return with_stand_ins({**kept, **TRAINED, "train_micro_batch_size_per_gpu": case.rows})[0]
