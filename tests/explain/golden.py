"""What the compilers make of the contract GPT at width 512: recorded, and recorded again.

python -m tests.explain.golden            write tests/data/golden/*.json
python -m tests.explain.golden --group 8  print the ledgers of the cases on 8 devices
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.processes import environment
from tests.support.trajectory import ROOT

FOLDER = ROOT / "tests/data/golden"
# Wide enough that the TPU's tiles of 8 x 128 matter for each shard of 8.
SCALE = {"DIM": 512, "VOCAB": 1024, "SEQ": 64, "HEADS": 8, "LAYERS": 1}
WIDTHS = ("fp32", "bf16")
BOTH = ("v5e:2x4", "v6e:2x4")


class Case(NamedTuple):
    """One config, and the topologies that it is compiled for beside the CPU."""

    stage: int
    dtype: str
    tpu: tuple[str, ...]
    micro_batches: int = 1
    devices: int = 8

    @property
    def name(self) -> str:
        return f"stage{self.stage}_{self.dtype}_k{self.micro_batches}_n{self.devices}"

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": self.dtype == "bf16"},
        }


CASES = (
    *(Case(stage, dtype, BOTH) for stage in (0, 1) for dtype in WIDTHS),
    Case(2, "fp32", BOTH),
    Case(2, "bf16", (*BOTH, "v5p:2x2x2")),
    Case(1, "bf16", ("v5e:2x4",), micro_batches=8),
    Case(2, "bf16", ("v5e:4x4", "2xv5e:2x4"), devices=16),
)


def explained(case: Case) -> dict[str, Any]:
    """The case's ledgers, in this process: what a change of compiler or engine may change."""
    import spmdzero
    from tests.support import contract

    for name, value in SCALE.items():
        setattr(contract, name, value)
    explanation = spmdzero.explain(
        contract.make_model(),
        case.config(),
        contract.make_batch(0, 0, rows=case.devices),
        tpu=case.tpu,
        stages=(),
    )
    fit = explanation.fit_at(case.stage)
    arguments = {m.target: m.memory.arguments for m in fit.compiled}
    return {
        "states": fit.states,
        "targets": {
            moves.target: {
                "arguments": arguments[moves.target],
                "over_floor": round(moves.over_floor, 4),
                "activations": len(moves.activations),
                "unnamed": len(moves.unnamed),
                "refused": sorted(refused.tensor for refused in moves.refused),
                "programs": {
                    program.kind: {"runs": program.runs, "collectives": rows(program.ledger)}
                    for program in moves.programs
                },
            }
            for moves in explanation.moves
        },
    }


def rows(ledger: Any) -> list[list[Any]]:
    """Role, kind, dtype, number of tensors and elements of each group of collectives."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for c in ledger.collectives:
        group = groups[
            c.role,
            f"{c.kind} + slice" if c.scattered and c.kind == "all-reduce" else c.kind,
            c.dtype,
        ]
        group[0] += 1
        elements = 1
        for length in c.shape:
            elements *= length
        group[1] += elements
    return [[*key, *counts] for key, counts in sorted(groups.items())]


def compile_group(devices: int) -> dict[str, Any]:
    """Case name -> `explained(case)` of the cases on so many devices, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.explain.golden", "--group", str(devices)],
        cwd=ROOT, env=environment(CPU_NUM_DEVICES=str(devices)), stdout=subprocess.PIPE, text=True,
        timeout=3000, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def recorded(case: Case) -> dict[str, Any]:
    return json.loads((FOLDER / f"{case.name}.json").read_text())


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--group"]:
        devices = int(arguments[1])
        print(json.dumps({c.name: explained(c) for c in CASES if c.devices == devices}))
        return
    for devices in sorted({case.devices for case in CASES}):
        for name, ledgers in compile_group(devices).items():
            Path(FOLDER, f"{name}.json").write_text(json.dumps(ledgers, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
