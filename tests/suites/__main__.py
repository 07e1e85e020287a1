"""Runs clients' own tests and compares their verdicts with the tables: fails where one changed.

    python -m tests.suites [NAME...] [-k EXPRESSION]

With `-k`, as pytest's, only tests that were run are compared.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.suites import sources, stand_ins, verdicts

_DEVICES = 2
# What another run would have left.
_LEFT = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "XLA_FLAGS")  # fmt: skip


def main() -> int:
    """Ends with 1 where a verdict has changed."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(sources.names()))
    parser.add_argument("-k", dest="chosen", default="", help="pytest's -k")
    told = parser.parse_args()
    changed = [
        _is_changed(sources.read(name), told.chosen) for name in told.names or sources.names()
    ]
    return int(any(changed))


def _is_changed(suite: sources.Suite, chosen: str) -> bool:
    sources.fetch(suite)
    groups = verdicts.read(suite.name)
    outcomes = _run(suite, groups, chosen)
    changes = list(verdicts.changes(groups, outcomes))
    if chosen:
        changes = [line for line in changes if not line.endswith("there is no such test")]
    counts = ", ".join(f"{name} {n}" for name, n in verdicts.counts(groups, outcomes).items())
    print(f"\n{suite.name} ({suite.repository}, {suite.near}): {len(outcomes)} tests: {counts}")
    for change in changes:
        print(f"  changed: {change}")
    return bool(changes)


def _run(
    suite: sources.Suite, groups: list[verdicts.Group], chosen: str
) -> dict[str, verdicts.Outcome]:
    folder = suite.root / suite.folder
    # Else pytest takes the settings of spmdzero's own tests, in which warnings are errors.
    (folder / "pytest.ini").write_text("[pytest]\n")
    left_out = [t for group in groups if group.verdict == "not_applicable" for t in group.tests]
    here = sources.HERE
    paths = [
        here / "in_pytest",
        here / "for_children",
        *(suite.root / path for path in suite.imports),
    ]
    paths += [sources.install(suite), here.parents[1]]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SPMDZERO_BACKEND": "jax",
        "SUITE_LEFT_OUT": json.dumps(left_out),
        "SUITE_OUTCOMES": str(sources.FETCHED / f"{suite.name}.json"),
        # Models have the names that tests ask for, and are small and of random weights.
        "HF_HOME": str(stand_ins.write(sources.FETCHED / "stand_ins")),
        "HF_HUB_OFFLINE": "1",
    }
    kept = {name: value for name, value in os.environ.items() if name not in _LEFT}
    spmdzero = str(Path(sys.executable).parent / "spmdzero")
    found: dict[str, verdicts.Outcome] = {}
    for run in suite.runs:
        said = Path(variables["SUITE_OUTCOMES"])
        said.unlink(missing_ok=True)
        pytest = [
            "pytest",
            "-p",
            "suite_outcomes",
            "-p",
            "no:cacheprovider",
            "-q",
            "--tb=short",
            "--durations=9",
        ]
        plugins = [word for name in suite.plugins for word in ("-p", name)]
        words = [*pytest, *plugins, "-p", "no:xdist", "-c", "pytest.ini", "--rootdir", "."]
        words += run.split()
        command = [spmdzero, "run", "--devices", str(_DEVICES), *words]
        subprocess.run(
            [*command, "-k", chosen] if chosen else command,
            cwd=folder, env=kept | suite.variables | variables, check=False,
        )  # fmt: skip
        told = json.loads(said.read_text()) if said.exists() else {}
        found |= {test: verdicts.Outcome(*outcome) for test, outcome in told.items()}
    return found


if __name__ == "__main__":
    sys.exit(main())
