"""Runs a script with an engine by spmdzero and by plain torch, and reads what both have written."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.stacks.runs import by_spmdzero, by_torch


def config(folder: Path, stage: int, rows: int) -> str:
    """Writes a DeepSpeed JSON for `rows` rows of a device; returns its path.

    DeepSpeed clips gradients to 1.0 unless it is told otherwise, and plain torch clips none.
    """
    told = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    path = folder / f"ds_{stage}.json"
    path.write_text(json.dumps(told))
    return str(path)


def both(
    script: Path, words: Sequence[str], folder: Path, *, stage: int, rows: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs `SCRIPT WORDS... OUT [CONFIG]` both ways; returns both `result.json`, ours first."""
    start = [str(script), *words]
    by_spmdzero([*start, str(folder / "ours"), config(folder, stage, rows)], cwd=folder)
    by_torch(["python", *start, str(folder / "plain")], cwd=folder)
    ours, plain = (
        json.loads((folder / name / "result.json").read_text()) for name in ("ours", "plain")
    )
    print(f"\n{' '.join(words)}, stage {stage}:", *(f"{a:.5f} ({b:.5f})"
          for a, b in zip(ours["losses"], plain["losses"], strict=True)))  # fmt: skip
    return ours, plain
