"""Writes tests/data/deepspeed_checkpoints/ by real DeepSpeed: `python -m tests.interchange.record`.

Each case trains `SAVED_AFTER` steps, saves, and goes on for `RESUMED_FOR` steps, whose losses are
what a resumed run must see. Two checkpoints are converted to the universal format too. With names
of cases only those are recorded, beside what is there.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.interchange.cases import CASES, RESUMED_FOR, SAVED_AFTER
from tests.support.deepspeed import run_ranks

ROOT = Path(__file__).parents[2]
OUT = ROOT / "tests" / "data" / "deepspeed_checkpoints"
AS_UNIVERSAL = ("z2_w4_bf16_frozen", "z3_w4_bf16_frozen")
TAG = f"global_step{SAVED_AFTER}"


def order(case: str, *, start: int, steps: int, **more: Any) -> dict[str, Any]:
    """What one run is to do; see `deepspeed_rank`."""
    quiet = {"load": None, "save": None, "save_at": None, "universal": False, "stage": None}
    quiet["autotp"] = False
    return quiet | {"case": case, "start": start, "steps": steps} | more


def train(orders: list[dict[str, Any]], *, ranks: int) -> list[dict[str, Any]]:
    """Runs the orders one after the other in the same processes of so many ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch, "orders.json"), Path(scratch, "results.json")
        asked.write_text(json.dumps(orders))
        run_ranks(
            ["-m", "tests.interchange.deepspeed_rank", str(asked), str(answered)],
            ranks=ranks,
            cwd=ROOT,
            timeout=900,
        )
        return json.loads(answered.read_text())


def main(asked: list[str]) -> None:
    """Records the cases of these names; all of them where there is none."""
    cases = {name: CASES[name] for name in asked or CASES}
    record = OUT / "losses.json"
    seen = json.loads(record.read_text()) if asked else {}
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in sorted({case["ranks"] for case in cases.values()}):
            names = [name for name, case in cases.items() if case["ranks"] == ranks]
            orders = [
                order(
                    name,
                    start=0,
                    steps=SAVED_AFTER + RESUMED_FOR,
                    save=str(Path(scratch, name)),
                    save_at=SAVED_AFTER,
                )
                for name in names
            ]
            for name, result in zip(names, train(orders, ranks=ranks), strict=True):
                seen[name] = result | {"resumed": result.pop("losses")[SAVED_AFTER:]}
        for name in cases:
            for folder in (OUT / name, OUT / f"{name}_universal"):
                shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(Path(scratch, name, TAG), OUT / name / TAG)
            (OUT / name / "latest").write_text(TAG)
            if name in AS_UNIVERSAL:
                convert_to_universal(OUT / name / TAG, OUT / f"{name}_universal")
    record.write_text(json.dumps(seen, indent=1) + "\n")


def convert_to_universal(source: Path, folder: Path) -> None:
    """Has DeepSpeed's own converter write `source`, the folder of a tag, into a new folder."""
    folder.mkdir()
    arguments = [
        "--inject_missing_state",
        "--input_folder",
        str(source),
        "--output_folder",
        str(folder / f"{TAG}_universal"),
    ]
    module = "deepspeed.checkpoint.ds_to_universal"
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, cwd=folder)


if __name__ == "__main__":
    main(sys.argv[1:])
