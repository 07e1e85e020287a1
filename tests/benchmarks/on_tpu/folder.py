"""Where programs and what became of them are kept, so that a run goes on where another stopped.

    programs/<hash>/module, request     a program as XLA reads it, and how it is to be compiled
    programs/<hash>/result, hlo.gz      the compiler's account, and the optimised program
    rows/<size>.<case>.<topology>.<row>.json    the programs of a row, and what is known of it

The hash is of the program and the request: an equal program is compiled once. Nothing here needs
more than Python, so a folder can be compiled on another machine.
"""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any


def keep_program(root: Path, module: bytes, request: dict[str, Any]) -> str:
    """Puts a program into the folder, and returns its hash."""
    told = json.dumps(request, sort_keys=True)
    digest = hashlib.sha256(module + told.encode()).hexdigest()[:32]
    program = root / "programs" / digest
    program.mkdir(parents=True, exist_ok=True)
    (program / "module").write_bytes(module)
    (program / "request").write_text(told)
    return digest


def keep_for_each(root: Path, module: bytes, requests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`keep_program` for each topology; what a writer answers for a step that is one program."""
    return {
        topology: {"programs": [keep_program(root, module, request)]}
        for topology, request in requests.items()
    }


def keep_row(root: Path, name: str, row: dict[str, Any]) -> None:
    """Puts a row into the folder, in the place of one of that name."""
    (root / "rows").mkdir(parents=True, exist_ok=True)
    (root / "rows" / f"{name}.json").write_text(json.dumps(row, indent=1))


def row_name(size: str, case: str, topology: str, row: str) -> str:
    """The name of a row's file."""
    return ".".join((size, case, topology.replace(":", "-"), row))


def row_of(root: Path, name: str) -> dict[str, Any] | None:
    """A row that was prepared, None where it wasn't."""
    path = root / "rows" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def result_of(root: Path, digest: str) -> dict[str, Any] | None:
    """What became of a program, None where it wasn't compiled."""
    path = root / "programs" / digest / "result"
    return json.loads(path.read_text()) if path.exists() else None


def hlo_of(root: Path, digest: str) -> str:
    """The optimised program."""
    return gzip.decompress((root / "programs" / digest / "hlo.gz").read_bytes()).decode()
