"""How long a step takes on a TPU by the TPU compiler's own count, beside steps written by hand.

python tests/benchmarks/tpu.py all --only gpt2 --topology v5e:2x4
python tests/benchmarks/tpu.py prepare --folder out/tpu
python tests/benchmarks/tpu.py compile --folder out/tpu --jobs 2
python tests/benchmarks/tpu.py read --folder out/tpu

Needs no TPU. `compile` needs jax and libtpu alone, so a prepared folder can be compiled elsewhere.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from on_tpu import cases, compiling, folder
from on_tpu.cases import SIZES, TOPOLOGIES, Row

KEPT = Path(__file__).resolve().parents[2] / "out" / "tpu"


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("prepare", "compile", "read", "all"))
    parser.add_argument("--only", action="append", choices=cases.CASES, help="a model")
    parser.add_argument("--topology", action="append", choices=TOPOLOGIES)
    parser.add_argument("--rows", help="names, such as ours,jax-plain")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--folder", type=Path, default=KEPT, help="where programs are kept")
    parser.add_argument("--jobs", type=int, default=1, help="programs compiled at once")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds, of one program")
    parser.add_argument("--list", action="store_true", help="say the rows, and do nothing")
    told = parser.parse_args()
    asked = list(_asked(told))
    if told.list:
        print("\n".join(f"{case} {topology} {name}" for case, topology, name, _ in asked))
        return
    if told.what in ("prepare", "all"):
        # One trace is for all chips that are as many.
        alike: dict[tuple[str, str, int], list[str]] = {}
        for case, topology, name, _ in asked:
            alike.setdefault((case, name, cases.devices_of(topology)), []).append(topology)
        for (case, name, devices), topologies in alike.items():
            row = cases.rows_of(case, topologies[-1])[name]
            _prepare(told.folder, told.size, case, name, row, topologies, devices)
    names = [folder.row_name(told.size, *which) for *which, _ in asked]
    if told.what in ("compile", "all"):
        rows = [row for name in names if (row := folder.row_of(told.folder, name))]
        digests = [digest for row in rows for digest in row.get("programs", ())]
        compiling.compile_all(told.folder, digests, jobs=told.jobs, timeout=told.timeout)
    if told.what in ("read", "all"):
        # Not before: what compiles elsewhere has no spmdzero.
        from on_tpu import section

        print("\n".join(section.lines(told.folder, names)))


def _asked(told: argparse.Namespace) -> Iterator[tuple[str, str, str, Row]]:
    wanted = told.rows.split(",") if told.rows else None
    for case in told.only or cases.CASES:
        for topology in told.topology or TOPOLOGIES:
            for name, row in cases.rows_of(case, topology).items():
                if wanted is None or name in wanted:
                    yield case, topology, name, row


def _prepare(
    root: Path, size: str, case: str, name: str, row: Row, topologies: list[str], devices: int
) -> None:
    # Not before: what compiles elsewhere has no torch.
    from harness.launch import launch_alone
    from harness.processes import ProcessFailedError
    from on_tpu.requests import request_of

    # A process of JAX imports nothing of spmdzero: their two XLAs can't share one.
    requests = {topology: request_of(topology) for topology in topologies}
    try:
        found = launch_alone(
            f"on_tpu.{row.writer}", devices=devices, root=str(root.resolve()), size=size,
            case=case, options=dict(row.options), requests=requests,
        )  # fmt: skip
    except ProcessFailedError as error:
        found = dict.fromkeys(topologies, {"failed": error.headline})
        print(error, file=sys.stderr)
    for topology in topologies:
        about = {"size": size, "case": case, "topology": topology, "row": name}
        folder.keep_row(
            root, folder.row_name(size, case, topology, name), {**about, **found[topology]}
        )
        print(f"{case} {topology} {name}: {found[topology]}", flush=True)


if __name__ == "__main__":
    main()
