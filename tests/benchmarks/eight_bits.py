"""Whether a TPU is faster with 8 bits: a Llama block's products, with their casts and scales.

python tests/benchmarks/eight_bits.py                       all chips: an hour on two cores
python tests/benchmarks/eight_bits.py --tpu v6e:2x4         one

Prints the table of docs/eight_bits.md, by libtpu's estimate. Needs no TPU; tpu7x needs a newer JAX
and libtpu than 0.0.21. What was compiled is kept in `out/eight_bits`.
"""

import argparse
import sys
from pathlib import Path

# Before what a script's own folder would hide.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.launch import launch_alone
from on_tpu import compiling, folder
from on_tpu.eight_bits import WAYS
from on_tpu.requests import request_of

from spmdzero.explain import Topology
from spmdzero.explain._timeline import timeline
from spmdzero.hlo import read_schedule

KEPT = Path(__file__).resolve().parents[2] / "out" / "eight_bits"
CHIPS = ("v5e:2x4", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1")
TIMEOUT = 3600  # seconds


def main() -> None:
    """Prints the table, a chip when all of its programs are compiled."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tpu", action="append", choices=CHIPS, help="again for more")
    print(f"| chip | {' | '.join(f'{way}, ms' for way in WAYS)} |")
    print("|---|" + "---:|" * len(WAYS), flush=True)
    for name in parser.parse_args().tpu or CHIPS:
        found = [milliseconds(name, way) for way in WAYS]
        shown = [f"{ms:.1f}, {found[0] / ms:.2f} times as fast" for ms in found[1:]]
        print(
            f"| {Topology.parse(name).chip.name} | {found[0]:.1f} | {' | '.join(shown)} |",
            flush=True,
        )


def milliseconds(name: str, way: str) -> float:
    """The estimate of the block's forward and backward."""
    topology = Topology.parse(name)
    answer = launch_alone(
        "on_tpu.eight_bits", devices=1, backend="jax", root=str(KEPT.resolve()), way=way,
        requests={name: request_of(name) | {"devices": topology.devices}},
    )  # fmt: skip
    (digest,) = answer[name]["programs"]
    compiling.compile_all(KEPT, [digest], jobs=1, timeout=TIMEOUT)
    spent = timeline(read_schedule(folder.hlo_of(KEPT, digest)), topology.chip)
    return 1e3 * sum(each.compute + each.waiting for each in spent)


if __name__ == "__main__":
    main()
