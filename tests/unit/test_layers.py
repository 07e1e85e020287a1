"""A folder is a layer: imports point one way, between files too, and one layer knows backends."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import spmdzero

pytestmark = pytest.mark.backends("any")

ROOT = Path(spmdzero.__file__).parent
DESIGN = ROOT.parent / "docs" / "design.md"


def layers() -> list[str]:
    """The table of docs/design.md: a layer may import what stands before it, and itself."""
    found = re.search(r"<!-- layers -->\n+```text\n(.*?)```", DESIGN.read_text(), re.DOTALL)
    assert found is not None
    return [line.split()[0] for line in found[1].splitlines()]


def files() -> dict[str, Path]:
    """Dotted name -> file, of all but the root's own thin face."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts and parts[0] not in ("__main__", "_initialize", "_public"):
            found[".".join(("spmdzero", *parts))] = path
    return found


FILES = files()
# torch_xla's device, as code names it: docstrings write ``"xla"``.
DEVICE = re.compile(r"""(?<!`)"xla(:\d+)?"(?!`)""")


def imports(path: Path) -> Iterator[str]:
    """Dotted names of modules, those under TYPE_CHECKING and inside of functions among them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else str(node.module)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            named = [word.value for word in node.args if isinstance(word, ast.Constant)]
            yield from (name for name in named if isinstance(name, str))


def layer_of(module: str, table: list[str]) -> int:
    """The layer with the longest name that the module is in."""
    path = module.removeprefix("spmdzero.").replace(".", "/")
    inside = [layer for layer in table if path == layer or path.startswith(f"{layer}/")]
    assert inside, f"{module} is in no layer of the table in docs/design.md"
    return table.index(max(inside, key=len))


def test_imports_point_downwards() -> None:
    table = layers()
    upward = [
        f"{module} imports {name}"
        for module, path in FILES.items()
        for name in imports(path)
        if name in FILES and layer_of(name, table) > layer_of(module, table)
    ]
    assert upward == []


def test_no_circle_of_imports_between_files() -> None:
    graph = {
        module: {name for name in imports(path) if name in FILES and name != module}
        for module, path in FILES.items()
    }
    # Raises CycleError, which names the files.
    graphlib.TopologicalSorter(graph).prepare()


def test_no_file_has_more_than_500_lines_and_no_function_more_than_80() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = {}
    for module, path in FILES.items():
        text = path.read_text()
        lengths[module] = len(text.splitlines()) - 500
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, functions) and node.end_lineno is not None:
                lengths[f"{module}.{node.name}"] = node.end_lineno - node.lineno + 1 - 80
    assert {name: over for name, over in lengths.items() if over > 0} == {}


# A first line that begins so is the rest of a sentence that nobody has begun.
NO_BEGINNING = {
    *("what", "which", "who", "whose", "that"),
    *(
        "of",
        "in",
        "on",
        "at",
        "by",
        "for",
        "from",
        "with",
        "without",
        "to",
        "into",
        "over",
        "under",
    ),
    *("between", "among", "through", "during", "before", "after", "as", "about", "against"),
    *("beside", "beyond", "since", "until", "within", "upon"),
}


def test_a_docstring_begins_with_what_it_names_or_does() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{module}: {text.splitlines()[0]}"
        for module, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
        if text.split()[0].lower() in NO_BEGINNING
    ]
    assert found == []


def test_every_layer_of_the_table_is_there() -> None:
    known = {module.removeprefix("spmdzero.").replace(".", "/") for module in FILES}
    assert [layer for layer in layers() if layer not in known] == []


def test_walks_of_the_design_go_downwards_through_files_that_are_there() -> None:
    table, page = layers(), DESIGN.read_text()
    walks = re.findall(r"^- \*\*One \w+\*\*.*?: (?:.+\n(?:  .+\n)*)", page, re.MULTILINE)
    assert len(walks) == 5
    for walk in walks:
        files = re.findall(r"`([\w/]+)\.py`", walk)
        assert [file for file in files if not (ROOT / f"{file}.py").is_file()] == []
        passed = [layer_of(file, table) for file in files]
        assert passed == sorted(passed, reverse=True), files


def test_the_files_to_change_for_a_rule_an_operation_a_key_and_a_stage_are_there() -> None:
    section = DESIGN.read_text().partition("## To change this\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- \*\*An? [\w' ]+\*\*: ", section, re.MULTILINE)) == 4
    named = re.findall(r"`([\w/]+\.py)`", section)
    roots = {file: ROOT.parent if file.startswith("tests/") else ROOT for file in named}
    assert len(roots) > 20
    assert [file for file, root in roots.items() if not (root / file).is_file()] == []


# Attention's kernels are written in JAX.
FOLDERS = {
    "torch_xla": ("spmdzero.backend.torch_xla",),
    "jax": ("spmdzero.backend.jax", "spmdzero.backend.attention"),
}


@pytest.mark.parametrize("package", FOLDERS)
def test_only_its_backend_imports_a_compilers_front_end(package: str) -> None:
    users = {m for m, p in FILES.items() if any(n.split(".")[0] == package for n in imports(p))}
    # A process of its own, which compiles for TPUs.
    users -= {"spmdzero.explain._aot_child"}
    assert users
    assert [m for m in sorted(users) if not m.startswith(FOLDERS[package])] == []


def test_one_file_chooses_a_backend_and_nothing_above_knows_which() -> None:
    ends = ("spmdzero.backend.torch_xla", "spmdzero.backend.jax")
    above = {m: p for m, p in FILES.items() if not m.startswith(ends)}
    # `spmdzero.backend._current` imports one by a name that it puts together.
    users = [m for m, p in above.items() if any(n.startswith(ends) for n in imports(p))]
    assert users == []
    named = [m for m, path in above.items() if DEVICE.search(path.read_text())]
    # `spmdzero.xla` is a path that scripts import.
    assert named == ["spmdzero.compat._old_paths"]


def test_private_torch_xla_calls_live_in_one_package() -> None:
    users = {p.parent.relative_to(ROOT) for p in ROOT.rglob("*.py") if "_XLAC" in p.read_text()}
    assert users == {Path("backend/torch_xla/_private")}
