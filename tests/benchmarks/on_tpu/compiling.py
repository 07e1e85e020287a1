"""Compiles prepared programs with libtpu: needs Python, jax and libtpu, nothing of spmdzero."""

import gzip
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from on_tpu import folder

# What `spmdzero explain` itself compiles with.
CHILD = Path(__file__).resolve().parents[3] / "spmdzero" / "explain" / "_aot_child.py"


def compile_all(root: Path, digests: Collection[str], *, jobs: int, timeout: int) -> None:
    """Compiles the programs that have no result yet; says each on stderr.

    Args:
        digests: of the programs.
        jobs: at once; each is a process of 1 to 6 GiB.
        timeout: seconds, of one.
    """
    missing = [d for d in dict.fromkeys(digests) if folder.result_of(root, d) is None]
    print(
        f"{len(missing)} programs to compile, {len(digests) - len(missing)} are there", flush=True
    )
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for _ in pool.map(lambda digest: _compile(root, digest, timeout=timeout), missing):
            pass


def _compile(root: Path, digest: str, *, timeout: int) -> None:
    program = root / "programs" / digest
    request = json.loads((program / "request").read_text())
    environment = {**os.environ, **request.pop("environment")}
    # jaxlib's XLA ends the process at a flag that it doesn't know.
    environment.pop("XLA_FLAGS", None)
    with tempfile.TemporaryDirectory() as scratch:
        told, made, hlo = (Path(scratch, name) for name in ("request", "made", "hlo"))
        told.write_text(json.dumps({**request, "module": str(program / "module"), "hlo": str(hlo)}))
        start = time.monotonic()
        result: dict[str, Any] = {}
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(CHILD), str(told), str(made)],
                env=environment, timeout=timeout, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                result["failed"] = f"status {done.returncode}: {_last_line(done.stderr)}"
                (program / "said").write_text(done.stderr)
            else:
                result |= json.loads(made.read_text())
        except subprocess.TimeoutExpired:
            result["failed"] = f"took more than {timeout} s"
        result["seconds"] = round(time.monotonic() - start, 1)
        result["date"] = time.strftime("%Y-%m-%d")
        result["libtpu"] = importlib.metadata.version("libtpu")
        if hlo.exists():
            (program / "hlo.gz").write_bytes(gzip.compress(hlo.read_bytes(), 6))
    (program / "result").write_text(json.dumps(result))
    said = result.get("failed") or result.get("exhausted", "compiled")
    print(
        f"{digest} {request['topology']} {result['seconds']} s: {said[:160]}",
        file=sys.stderr,
        flush=True,
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:500] if lines else "nothing said"
