"""A folder is a layer: imports point one way, and only one layer knows torch_xla."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import spmdzero

ROOT = Path(spmdzero.__file__).parent
# A layer may import what stands before it, and itself.
LAYERS = [
    *(
        "errors",
        "_logging",
        "_rich",
        "refusals",
        "config",
        "monitor",
        "plan",
        "store",
        "xla",
        "comm",
        "optim",
        "precision",
    ),
    *("engine", "inspect", "profiling", "audit", "checkpointing", "zero", "accelerator"),
    *("utils", "ops", "checkpoint", "runtime", "launcher", "explain", "cli"),
]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: write absolute imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    layer = LAYERS.index(path.relative_to(ROOT).parts[0])
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "torch_xla":
            assert LAYERS[layer] == "xla", f"{path} imports {name}"
        if parts[0] == "spmdzero":
            assert LAYERS.index(parts[1]) <= layer, f"{path} imports {name}"


def test_private_torch_xla_calls_live_in_one_package() -> None:
    users = {p.parent.relative_to(ROOT) for p in ROOT.rglob("*.py") if "_XLAC" in p.read_text()}
    assert users == {Path("xla/_private")}
