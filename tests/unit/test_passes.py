"""A command whose programs are compiled while it is not there."""

import sys
from pathlib import Path

import pytest

from spmdzero.explain._passes import main

pytestmark = pytest.mark.backends("any")

COMMAND = """
import json, os, pathlib, sys
counted, compiler = sys.argv[1:]
with open(counted, "a") as lines:
    print(os.getpid(), file=lines)
program = pathlib.Path(os.environ["SPMDZERO_COMPILED_PROGRAMS"], "one")
if not program.exists():
    program.mkdir()
    order = {
        "name": "v5e:2x4", "timeout": 60, "environment": dict(os.environ),
        "command": [sys.executable, "-c", compiler, counted],
    }
    (program / "order").write_text(json.dumps(order))
    sys.exit(75)
done = json.loads((program / "status").read_text())
sys.exit(done["status"] if done["said"] == "said" else 1)
"""
# The processes of the passes that are still there, for the test; 7 for the command.
COMPILER = """
import pathlib, sys
counted = pathlib.Path(sys.argv[1])
alive = [pid for pid in counted.read_text().split() if pathlib.Path("/proc", pid).exists()]
(counted.parent / "alive").write_text(repr(alive))
print("said", end="", file=sys.stderr)
sys.exit(7)
"""
ENDLESS = """
import json, os, pathlib, sys, uuid
program = pathlib.Path(os.environ["SPMDZERO_COMPILED_PROGRAMS"], uuid.uuid4().hex)
program.mkdir()
order = {"name": "", "timeout": 60, "environment": {}, "command": ["true"]}
(program / "order").write_text(json.dumps(order))
sys.exit(75)
"""


def test_a_program_is_compiled_between_two_passes(tmp_path: Path) -> None:
    passes = tmp_path / "passes"
    assert main(sys.executable, "-c", COMMAND, str(passes), COMPILER) == 7
    assert len(passes.read_text().split()) == 2
    assert (tmp_path / "alive").read_text() == "[]"


def test_a_command_that_wants_nothing_compiled_runs_once() -> None:
    assert main(sys.executable, "-c", "raise SystemExit(5)") == 5


def test_a_program_that_differs_from_pass_to_pass_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(sys.executable, "-c", ENDLESS) == 1
    assert "another program" in capsys.readouterr().err
