"""One GPU: spmdzero on JAX beside JAX by hand and real DeepSpeed, which run one after the other.

`make bench-gpu`, or `python tests/benchmarks/gpu.py [--model gpt-163m]`; it prints tables.
"""

import argparse
import dataclasses
import subprocess
from pathlib import Path

from harness import candidates as who
from harness import machine, report
from harness.candidates import Candidate
from harness.peer_sections import run_all
from harness.workload import Workload

_PLAIN = who.ours("ZeRO-2, plain attention", attention="plain")
_COMPILED = dataclasses.replace(
    who.DEEPSPEED_2,
    name="DeepSpeed ZeRO-2, torch.compile",
    options={"stage": 2, "compiled": True},
)
_FEW = (who.ZERO_2, who.THREE_CALLS, who.JAX, who.DEEPSPEED_2)
MODELS: dict[str, tuple[bool, tuple[Candidate, ...], float]] = {
    "gpt-10m": (False, _FEW, report.LOSS_TOLERANCE),
    # Of bf16 each product is rounded to 8 bits, by each program at other places.
    "gpt-163m": (True, (*_FEW, _PLAIN, _COMPILED), 0.05),
}
"""Of each model whether it is trained in bf16, by whom, and how far apart losses may be."""


def table(model: str, *, steps: int, rounds: int) -> str:
    """What each takes of one device's step, with remarks."""
    bf16, candidates, tolerance = MODELS[model]
    workload = Workload(model=model, devices=1, steps=steps, unread=steps, bf16=bf16)
    runs = run_all(workload, candidates, rounds=rounds, gpu=True)
    remarks = report.remarks(runs, tolerance=tolerance)
    title = f"{model}, one GPU, {'bf16' if bf16 else 'fp32'}:"
    return "\n".join([title, "", report.gpu_table(runs), "", *remarks])


def _gpu() -> str:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "no GPU"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append", help="all of them")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2, help="processes of each candidate")
    parser.add_argument("--out", type=Path, help="a file for the tables")
    given = parser.parse_args()
    lines = [f"- {line}" for line in (*machine.describe(), _gpu())]
    for name in given.model or MODELS:
        lines += ["", table(name, steps=given.steps, rounds=given.rounds)]
        if given.out:
            given.out.write_text("\n".join(lines) + "\n")
    print(*lines, sep="\n")
