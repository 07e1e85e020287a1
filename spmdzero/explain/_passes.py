"""Runs a command in passes, so that its memory is free while the TPU's compiler runs.

    python -P _passes.py COMMAND ...

The file runs by its path and imports nothing of spmdzero, whose torch alone takes 0.4 GiB. A pass
of the command writes the missing programs into a folder and ends with the status `WAITING`; this
process compiles them one at a time, and the next pass finds them.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = "SPMDZERO_COMPILED_PROGRAMS"
"""The environment variable that names the folder."""
WAITING = 75
"""The status of a pass that lacks programs; in sysexits.h it means: try again later."""
# Largest number of passes: one for each stage and number of devices, and the last. Without a limit,
# a program that differs each time would have no last pass.
_MOST = 32
# Seconds between two lines that say that a piece of work still goes on.
_EVERY = 60.0


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
                    name = json.loads((program / "order").read_text())["name"]
                    with told(f"compiling for {name}", _say):
                        compile_one(program)
    _say("explain: each pass traces another program")
    return 1


def is_first() -> bool:
    """Whether this process is the first pass, or no pass at all: what it logs is new."""
    folder = os.environ.get(FOLDER)
    return folder is None or not any(Path(folder).iterdir())


@contextlib.contextmanager
def told(work: str, say: Callable[[str], None]) -> Iterator[None]:
    """Says that a piece of work begins, each minute that it goes on, and how long it took."""
    start, over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not over.wait(_EVERY):
            say(f"explain: {work}, {time.monotonic() - start:.0f} s so far ...")

    say(f"explain: {work} ...")
    threading.Thread(target=tell, name="explain's progress", daemon=True).start()
    try:
        yield
    finally:
        over.set()
    say(f"explain: {work} took {time.monotonic() - start:.1f} s")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def compile_one(program: Path) -> None:
    """Runs the compiler by the file "order"; writes its status and stderr to the file "status"."""
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
