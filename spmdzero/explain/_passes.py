"""Runs a command in passes, so that its memory is free while the TPU's compiler runs.

    python -P _passes.py COMMAND ...

The file runs by its path and imports nothing of spmdzero, whose torch alone takes 0.4 GiB. A pass
of the command writes the missing programs into a folder and ends with the status `WAITING`; this
process compiles them one at a time, and the next pass finds them.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = "SPMDZERO_COMPILED_PROGRAMS"
"""The environment variable that names the folder."""
WAITING = 75
"""The status of a pass that lacks programs; in sysexits.h it means: try again later."""
# Largest number of passes: one for each stage and number of devices, and the last. Without a limit,
# a program that differs each time would have no last pass.
_MOST = 32


def main(*command: str) -> int:
    """Runs the passes; returns the status of the last one."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, FOLDER: folder}
        for _ in range(_MOST):
            status = subprocess.run(command, env=environment, check=False).returncode
            if status != WAITING:
                return status
            for program in Path(folder).iterdir():
                if not (program / "status").exists():
                    start = time.monotonic()
                    name = compile_one(program)
                    taken = time.monotonic() - start
                    print(f"explain: compiled for {name}, {taken:.1f} s", file=sys.stderr)
    print("explain: each pass traces another program", file=sys.stderr)
    return 1


def compile_one(program: Path) -> str:
    """Runs the compiler by the file "order"; writes its status and stderr to the file "status".

    Returns the name of the topology.
    """
    order = json.loads((program / "order").read_text())
    try:
        done = subprocess.run(
            order["command"], env=order["environment"], timeout=order["timeout"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        found = {"status": done.returncode, "said": done.stderr}
    except subprocess.TimeoutExpired:
        found = {"status": None, "said": ""}
    (program / "status").write_text(json.dumps(found))
    return order["name"]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
