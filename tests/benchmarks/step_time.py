"""Seconds per step of one config: propagation, the replica region twice, and real DeepSpeed.

python tests/benchmarks/step_time.py --model gpt --devices 2 --steps 10 --out build/step_time.md
"""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import report
from harness.candidates import candidates_for
from harness.launch import CandidateFailedError, launch
from harness.worker import WARM_UP, Run
from harness.workload import GLOBAL_BATCH, Workload


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("gpt", "cnn"), default="gpt")
    parser.add_argument("--devices", type=_count, default=2, help="devices, or DeepSpeed ranks")
    parser.add_argument("--steps", type=_count, default=10, help="timed steps of one round")
    parser.add_argument("--rounds", type=_count, default=3, help="processes per candidate")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), default=2)
    parser.add_argument(
        "--what",
        choices=("step", "host"),
        default="step",
        help="step: compare candidates; host: tracing against device time of the region",
    )
    parser.add_argument("--out", type=Path, help="a markdown file for what is printed")
    args = parser.parse_args(argv)
    if GLOBAL_BATCH % args.devices:
        parser.error(f"--devices {args.devices} does not divide the {GLOBAL_BATCH} rows of a step")
    return args


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def measure(args: argparse.Namespace) -> dict[str, list[Run]]:
    """Candidate name -> its runs; the candidates take turns, so that a slow minute hits all.

    Raises:
        CandidateFailedError: a candidate's process failed.
    """
    workload = Workload(
        model=args.model,
        devices=args.devices,
        dtype=args.dtype,
        stage=args.stage,
        steps=args.steps,
    )
    candidates = candidates_for(args.what)
    runs: dict[str, list[Run]] = {candidate.name: [] for candidate in candidates}
    for turn in range(args.rounds):
        for candidate in candidates:
            print(f"round {turn + 1} of {args.rounds}: {candidate.name}", file=sys.stderr)
            runs[candidate.name].append(launch(workload, candidate))
    return runs


def render(args: argparse.Namespace, runs: report.Runs, *, command: str) -> str:
    """Header, table and remarks as markdown."""
    note = report.noise_note(runs)
    lines = [
        f"- `{command}`",
        f"- {report.versions()}, Python {platform.python_version()}",
        f"- {os.cpu_count()} CPUs ({platform.machine()}), load {os.getloadavg()[0]:.1f} at the end",
        f"- {args.model}, {args.dtype}, stage {args.stage}, {args.devices} devices, "
        f"{GLOBAL_BATCH} rows a step; {args.rounds} rounds of {WARM_UP} + {args.steps} steps",
        "",
        report.host_table(runs) if args.what == "host" else report.step_table(runs),
        "",
        f"Largest difference of a loss at one step: {report.loss_difference(runs):.1e}.",
        *([note] if note else []),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> str | None:
    """Measures and prints; returns what is wrong, for `sys.exit`."""
    args = parse(argv)
    try:
        runs = measure(args)
    except CandidateFailedError as error:
        return str(error)
    text = render(
        args, runs, command=shlex.join(["python", "tests/benchmarks/step_time.py", *argv])
    )
    print(text, end="")
    if args.out:
        args.out.write_text(text)
    return verdict(args.dtype, report.loss_difference(runs))


def verdict(dtype: str, difference: float) -> str | None:
    """What is wrong with the losses, or None; bf16 losses may round apart."""
    if dtype == "fp32" and not difference <= report.LOSS_TOLERANCE:
        return (
            f"the losses differ by {difference:.1e}, more than {report.LOSS_TOLERANCE:.0e}: "
            "the candidates did not do the same work"
        )
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
