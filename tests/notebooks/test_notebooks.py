"""The notebooks run, and show what they were committed with."""

import re
from pathlib import Path

import nbformat
import pytest

from spmdzero.backend import current
from tests.notebooks.deepspeed_losses import recorded, under_deepspeed
from tests.notebooks.execute import NOTEBOOKS
from tests.support.processes import ROOT, run_python
from tests.support.selected import outside

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
# They ask for programs of TPUs that aren't there.
JAX_ALONE = {"03_tpu_without_a_tpu", "06_what_to_write"}


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: nbformat.NotebookNode) -> list[object]:
    """What a cell shows, without its contents."""
    return [
        output.name if output.output_type == "stream" else sorted(output.get("data", ()))
        for output in cell.outputs
    ]


def is_checked(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell's outputs are the committed ones; tagged `jax`, with that backend."""
    tags = cell.metadata.get("tags", ())
    return "checked" in tags and ("jax" not in tags or current().name == "jax")


def shown(cell: nbformat.NotebookNode) -> list[str]:
    """The text and HTML of a cell's outputs."""
    found = []
    for output in cell.outputs:
        texts = {"text/plain": output.text} if output.output_type == "stream" else output.data
        found += [text for kind, text in sorted(texts.items()) if kind.startswith("text/")]
    return found


def marks(path: Path) -> list[pytest.MarkDecorator]:
    """Of the test that runs a notebook: `make test` runs the first, each backend those it can."""
    alone = [pytest.mark.backends("jax")] if path.stem in JAX_ALONE else []
    return [*outside(PATHS[:1], path), *alone]


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=marks(path)) for path in PATHS]
)
def test_a_notebook_runs_and_shows_what_it_was_committed_with(path: Path, tmp_path: Path) -> None:
    # A process of its own: the kernel's client leaves sockets open, which is a warning here.
    run_python("-m", "tests.notebooks.execute", str(path), str(tmp_path / path.name), devices=8)
    fresh, committed = code_cells(read(tmp_path / path.name)), code_cells(read(path))
    for now, then in zip(fresh, committed, strict=True):
        assert kinds(now) == kinds(then), now.source
        if is_checked(now):
            assert shown(now) == shown(then), now.source


@pytest.mark.slow
def test_the_losses_beside_which_a_notebook_stands_are_deepspeeds() -> None:
    # Recorded with six digits after the point; gloo may sum in another order elsewhere.
    assert recorded() == pytest.approx(under_deepspeed(), abs=2e-5)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_a_fresh_kernel_ran_it(path: Path) -> None:
    notebook = read(path)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
    # Warnings and log lines go to stderr.
    assert all(output.get("name") != "stderr" for output in outputs)
    checked = [cell for cell in cells if "checked" in cell.metadata.get("tags", ())]
    assert len(checked) >= 4
    assert all(shown(cell) for cell in checked)
    # No path of the machine that ran it.
    for text in (text for cell in cells for text in shown(cell)):
        assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr)/", text), text
    # It starts with what its reader can do afterwards, and the index of the docs lists it.
    assert notebook.cells[0].cell_type == "markdown"
    title, promise, *_ = notebook.cells[0].source.split("\n\n")
    assert title.startswith("# ")
    assert promise.startswith("After this notebook you can ")
    assert f"(../notebooks/{path.name})" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_folds_the_long_cells_that_are_not_what_it_is_about(path: Path) -> None:
    for cell in code_cells(read(path)):
        tags = cell.metadata.get("tags", ())
        # JupyterLab's word for it, and the site's.
        folded = (
            cell.metadata.get("jupyter", {}).get("source_hidden", False),
            "hide-input" in tags,
        )
        is_long = len(cell.source.splitlines()) > 15
        assert folded == (is_long and not {"read", "script"} & set(tags),) * 2, cell.source


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_says_in_its_first_cell_what_it_needs_beside_spmdzero(path: Path) -> None:
    notebook = read(path)
    imported = re.findall(
        r"^(?:from|import) (jax|sklearn)\b",
        "\n".join(cell.source for cell in code_cells(notebook)),
        re.MULTILINE,
    )
    names = {"jax": "`jax`", "sklearn": "scikit-learn"}
    assert all(names[name] in notebook.cells[0].source for name in imported)


def test_a_mesh_that_a_page_makes_in_jax_has_axes_that_annotations_can_name() -> None:
    # Those that newer JAX makes unless it is told are explicit, which with_sharding_constraint
    # refuses; the JAX of these tests makes others.
    pages = [*PATHS, *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    made = [
        line for page in pages for line in page.read_text().splitlines() if "make_mesh(" in line
    ]
    assert len(made) >= 3
    assert all("axis_types=" in line and "AxisType.Auto" in line for line in made), made
