"""What the compilers make of three small models: recorded, and recorded again.

python -m tests.explain.golden              write tests/data/golden/*.json
python -m tests.explain.golden --cases JSON     print the ledgers of cases on as many devices
"""

import itertools
import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.processes import environment
from tests.support.trajectory import ROOT

FOLDER = ROOT / "tests/data/golden"
MODELS = ("gpt", "bert", "resnet")
WIDTHS = ("fp32", "bf16")
AT_ONCE = ("v5e:2x4", "v6e:2x4")
# Where libtpu makes reduce-scatters: on the last two of a direction of the torus after another.
SCATTERING = (*AT_ONCE, "v5p:2x2x2", "v5e:4x4")
ON_8, ON_16 = (*AT_ONCE, "v5p:2x2x2"), ("v5e:4x4", "2xv5e:2x4")


class Case(NamedTuple):
    """One model and config, and the topologies that it is compiled for."""

    model: str
    stage: int
    dtype: str
    devices: int
    tpu: tuple[str, ...]
    micro_batches: int = 1

    @property
    def name(self) -> str:
        name = f"{self.model}_stage{self.stage}_{self.dtype}_n{self.devices}"
        return name if self.micro_batches == 1 else f"{name}_k{self.micro_batches}"

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": self.dtype == "bf16"},
            # As the explanation advises: libtpu sums gradients of vectors whole, these of 2,048
            # elements too.
            "spmd": {"min_shard_elements": 2049},
        }


CASES = (
    *(
        Case(model, stage, dtype, devices, tpu)
        for model in MODELS
        for devices, tpu in ((8, ON_8), (16, ON_16))
        for stage in (0, 1, 2)
        for dtype in WIDTHS
    ),
    Case("gpt", 1, "bf16", 8, AT_ONCE, micro_batches=8),
)


def explained(case: Case) -> dict[str, Any]:
    """The case's ledgers, in this process: what a change of compiler or engine may change."""
    import torch

    import spmdzero
    from tests.support.models import KINDS

    kind = KINDS[case.model]
    # On 16 devices nothing is run and XLA's CPU compiler not asked: it does as it does on 8.
    with torch.device("cpu" if case.devices == 8 else "meta"):
        model = kind.model()
    explanation = spmdzero.explain(
        model, case.config(), kind.batch(case.devices), tpu=case.tpu, stages=()
    )
    fit = explanation.fit_at(case.stage)
    arguments = {m.target: m.memory.arguments for m in fit.compiled}
    return {
        "states": fit.states,
        "findings": [f"{f.name}: {f.subject}" for f in explanation.audit.findings],
        "targets": {
            moves.target: {
                "arguments": arguments[moves.target],
                "over_floor": round(moves.over_floor, 4),
                "activations": len(moves.activations),
                "unnamed": len(moves.unnamed),
                "in_loops": sum(c.in_loop for p in moves.programs for c in p.ledger.collectives),
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
        group = groups[c.role, c.kind_and_slice, c.dtype]
        group[0] += 1
        group[1] += math.prod(c.shape)
    return [[*key, *counts] for key, counts in sorted(groups.items())]


def compile_together(cases: Iterable[Case], *, devices: int) -> dict[str, Any]:
    """Case name -> `explained(case)` of cases on so many devices, in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.explain.golden", "--cases", json.dumps([*cases])],
        cwd=ROOT, env=environment(CPU_NUM_DEVICES=str(devices)), stdout=subprocess.PIPE, text=True,
        timeout=3000, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def recorded(case: Case) -> dict[str, Any]:
    """What was recorded of the case on its topologies, and on the CPU."""
    found = json.loads((FOLDER / f"{case.name}.json").read_text())
    return found | {"targets": of_its_targets(case, found)}


def of_its_targets(case: Case, explained: dict[str, Any]) -> dict[str, Any]:
    """Those of what was explained that the case is about."""
    mine = (f"cpu:{case.devices}", *case.tpu)
    return {name: found for name, found in explained["targets"].items() if name in mine}


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--cases"]:
        mine = [Case(*fields) for fields in json.loads(arguments[1])]
        print(json.dumps({case.name: explained(case) for case in mine}))
        return
    for model, devices in itertools.product(MODELS, (8, 16)):
        mine = [case for case in CASES if (case.model, case.devices) == (model, devices)]
        for name, ledgers in compile_together(mine, devices=devices).items():
            Path(FOLDER, f"{name}.json").write_text(json.dumps(ledgers, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
