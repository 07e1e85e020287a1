"""One GPU: spmdzero on JAX beside JAX by hand and real DeepSpeed, which run one after the other.

`make bench-gpu`, or `python tests/benchmarks/gpu.py [--model gpt-85m]`; it prints a table.
"""

import argparse

from harness import candidates as who
from harness import machine, report
from harness.peer_sections import run_all
from harness.workload import SIZES, Workload

CANDIDATES = (who.ON_JAX, who.ON_JAX_THREE_CALLS, who.JAX, who.DEEPSPEED_2)


def table(model: str, *, steps: int, rounds: int) -> str:
    """What each takes of one device's step, with remarks."""
    runs = run_all(
        Workload(model=model, devices=1, steps=steps), CANDIDATES, rounds=rounds, gpu=True
    )
    return "\n".join([report.peer_table(runs), "", *report.remarks(runs)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, action="append", help="gpt-10m and gpt-85m")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    print(*(f"- {line}" for line in machine.describe()), sep="\n")
    for name in given.model or ("gpt-10m", "gpt-85m"):
        print(f"\n{name}, one GPU, fp32:\n\n{table(name, steps=given.steps, rounds=given.rounds)}")
