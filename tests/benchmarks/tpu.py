"""How long a step takes on a TPU by the TPU compiler's own count, beside steps written by hand.

python tests/benchmarks/tpu.py all --only gpt2 --topology v5e:2x4
python tests/benchmarks/tpu.py prepare --folder out/tpu
python tests/benchmarks/tpu.py compile --folder out/tpu --jobs 2
python tests/benchmarks/tpu.py read --folder out/tpu

Needs no TPU. `compile` needs jax and libtpu alone, so a prepared folder can be compiled elsewhere,
and goes on where it was interrupted.
"""

import argparse
import functools
import hashlib
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from harness.scale import Scale
from on_tpu import cases, compiling, folder
from on_tpu.cases import SIZES, TOPOLOGIES

KEPT = Path(__file__).resolve().parents[2] / "out" / "tpu"
TIMEOUT = 3600  # seconds
BY_HAND = ("by_hand", "cases", "jax_models", "jax_resnet", "requests")
"""Of what is written by hand in JAX."""

Which = tuple[str, str, str]
"""A case, a topology, and a row."""


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("list", "prepare", "compile", "read", "all"))
    parser.add_argument("--only", action="append", choices=cases.CASES, help="a model")
    parser.add_argument("--topology", action="append", choices=TOPOLOGIES)
    parser.add_argument("--rows", help="names, such as ours,jax-plain")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--folder", type=Path, default=KEPT, help="where programs are kept")
    parser.add_argument("--jobs", type=int, default=1, help="programs compiled at once")
    parser.add_argument("--timeout", type=int, default=TIMEOUT, help="seconds, of one program")
    told = parser.parse_args()
    which = list(
        asked(
            told.only or cases.CASES,
            told.topology or TOPOLOGIES,
            told.rows.split(",") if told.rows else None,
        )
    )
    if told.what == "list":
        print("\n".join(" ".join(each) for each in which))
    if told.what in ("prepare", "all"):
        prepare(told.folder, told.size, which)
    if told.what in ("compile", "all"):
        compile_(told.folder, told.size, which, jobs=told.jobs, timeout=told.timeout)
    if told.what in ("read", "all"):
        print("\n".join(read(told.folder, told.size, which)))


def a_step(scale: Scale) -> Iterator[str]:
    """The section of docs/benchmarks.md: all three, with what `KEPT` has already."""
    which = list(asked(scale.tpu_cases, scale.tpu_topologies, scale.tpu_rows))
    if scale.tpu_compile:
        prepare(KEPT, scale.tpu_size, which)
        compile_(KEPT, scale.tpu_size, which, jobs=1, timeout=TIMEOUT)
        yield from read(KEPT, scale.tpu_size, which)
        return
    compiled = [each for each in which if _is_compiled(KEPT, scale.tpu_size, each)]
    yield from read(KEPT, scale.tpu_size, compiled)
    left = len(which) - len(compiled)
    yield (
        f"\n{len(compiled)} of {len(which)} rows were compiled; `python "
        f"tests/benchmarks/tpu.py all` compiles the other {left}."
    )


def _is_compiled(root: Path, size: str, which: Which) -> bool:
    row = folder.row_of(root, folder.row_name(size, *which)) or {}
    programs = row.get("programs", ())
    return bool(programs) and all(folder.result_of(root, each) for each in programs)


def asked(
    models: Collection[str], topologies: Collection[str], rows: Collection[str] | None
) -> Iterator[Which]:
    """The rows of these names, None for all, in the order of the tables."""
    for case in models:
        topology, _ = cases.TABLES[case]
        for name in cases.rows_of(case):
            if topology in topologies and (rows is None or name in rows):
                yield case, topology, name


def prepare(root: Path, size: str, which: Sequence[Which]) -> None:
    """Traces the rows, each in a process of its own, and keeps their programs.

    A row that was traced from the same sources is left as it is.
    """
    for case, topology, name in which:
        known = folder.row_of(root, folder.row_name(size, case, topology, name)) or {}
        if "failed" in known or known.get("sources") != _sources(cases.rows_of(case)[name].writer):
            _prepare(root, size, case, name, topology)


@functools.cache
def _sources(writer: str) -> str:
    """A hash of what decides which program a row is, as far as it is written here."""
    here = Path(__file__).parent
    by_hand = [here / "on_tpu" / f"{name}.py" for name in BY_HAND]
    others = [*(here / "on_tpu").glob("*.py"), *here.parents[1].glob("spmdzero/**/*.py")]
    found = hashlib.sha256()
    for path in sorted(by_hand if writer == "by_hand" else others):
        found.update(path.read_bytes())
    return found.hexdigest()[:32]


def _prepare(root: Path, size: str, case: str, name: str, topology: str) -> None:
    # Not before: what compiles elsewhere has no torch.
    from harness.launch import launch_alone
    from harness.processes import ProcessFailedError
    from on_tpu.requests import request_of

    from spmdzero.explain import Topology

    row = cases.rows_of(case)[name]
    try:
        found = launch_alone(
            f"on_tpu.{row.writer}", devices=Topology.parse(topology).devices, backend="jax",
            root=str(root.resolve()), size=size, case=case, options=dict(row.options),
            requests={topology: request_of(topology)},
        )  # fmt: skip
    except ProcessFailedError as error:
        found = {topology: {"failed": error.headline}}
        print(error, file=sys.stderr)
    about = {"size": size, "case": case, "topology": topology, "row": name}
    about |= {"sources": _sources(row.writer), **found[topology]}
    folder.keep_row(root, folder.row_name(size, case, topology, name), about)
    print(f"{case} {topology} {name}: {found[topology]}", file=sys.stderr, flush=True)


def compile_(root: Path, size: str, which: Sequence[Which], *, jobs: int, timeout: int) -> None:
    """Compiles what these rows have and nobody compiled yet, `jobs` programs at once."""
    rows = [row for each in which if (row := folder.row_of(root, folder.row_name(size, *each)))]
    digests = [digest for row in rows for digest in row.get("programs", ())]
    compiling.compile_all(root, digests, jobs=jobs, timeout=timeout)


def read(root: Path, size: str, which: Sequence[Which]) -> Iterator[str]:
    """The tables."""
    # Not before: what compiles elsewhere has no spmdzero.
    from on_tpu import section

    return section.lines(root, [folder.row_name(size, *each) for each in which])


if __name__ == "__main__":
    main()
