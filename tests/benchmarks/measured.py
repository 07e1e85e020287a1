"""What the TPU's compiler makes of steps that others measured: the parts of their estimate.

python tests/benchmarks/measured.py                every program without an estimate
python tests/benchmarks/measured.py v6e-8b         this one anew

Needs no TPU. A program takes minutes. Those for tpu7x need a newer JAX and libtpu than 0.0.21: run
it for them with a Python that has these.
Afterwards `make calibration` fits.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# Before what a script's own folder would hide.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.launch import launch_alone
from on_tpu import compiling, folder
from on_tpu.requests import request_of

from spmdzero.explain import Topology
from spmdzero.explain._timeline import timeline
from spmdzero.hlo import read_schedule
from tests.support.measured_steps import DATA, load, parts_of

KEPT = Path(__file__).resolve().parents[2] / "out" / "measured"
TIMEOUT = 3600  # seconds
# Side of attention's blocks. Larger ones, as published, compile for long, and have no estimate.
BLOCK = 512


def main() -> None:
    """Compiles one program after the other, and keeps what is read of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="programs of tests/data/measured_steps.json")
    asked = parser.parse_args().names
    programs = load()["programs"]
    for name in asked or [name for name, program in programs.items() if "parts" not in program]:
        made = estimated(name, programs[name], load()["flags"])
        if made is None:
            continue
        # Read again: a run beside this one may have written.
        told = load()
        told["programs"][name] |= made
        DATA.write_text(json.dumps(told, indent=1) + "\n")


def estimated(name: str, program: dict[str, Any], flags: dict[str, str]) -> dict[str, Any] | None:
    """The parts of a program's estimate; None if it could not be compiled."""
    topology = Topology.parse(program["topology"])
    request = request_of(topology.name)
    request["environment"]["LIBTPU_INIT_ARGS"] = " ".join(flags[f] for f in program["flags"])
    recipe = program["recipe"] | {"block": min(program["recipe"].get("block", BLOCK), BLOCK)}
    answer = launch_alone(
        "on_tpu.published", devices=topology.devices, backend="jax", root=str(KEPT.resolve()),
        recipe=recipe, requests={topology.name: request},
    )  # fmt: skip
    (digest,) = answer[topology.name]["programs"]
    compiling.compile_all(KEPT, [digest], jobs=1, timeout=TIMEOUT)
    result = folder.result_of(KEPT, digest) or {}
    if "peak" not in result:
        print(f"{name}: {result.get('failed') or result.get('exhausted')}", file=sys.stderr)
        return None
    spent = timeline(read_schedule(folder.hlo_of(KEPT, digest)), topology.chip)
    return {
        "compiled_block": recipe["block"],
        "libtpu": result["libtpu"],
        "date": result["date"],
        "peak_bytes": result["peak"],
        "parts": {
            part: {name: float(f"{seconds:.5g}") for name, seconds in classes.items()}
            for part, classes in parts_of(spent).items()
        },
    }


if __name__ == "__main__":
    main()
