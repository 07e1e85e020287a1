"""The documentation's site builds without a warning and leaves nothing out."""

import inspect
import json
import os.path
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, named
from sphinx.util.inventory import InventoryFile

import spmdzero
from tests.notebooks.picture import PICTURE, drawn
from tests.support.processes import environment

pytestmark = pytest.mark.backends("any")

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HOME = "docs/index.html"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
    done = subprocess.run(
        [*sphinx, "-c", "docs", ".", str(folder)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    # "isn't included in any toctree": name the page in one of those of docs/index.md.
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("source", [*PAGES, *NOTEBOOKS], ids=named)
def test_the_sites_navigation_leads_to_each_page_and_notebook(site: Path, source: Path) -> None:
    page = named(source.with_suffix(".html"))
    assert (site / page).is_file()
    sidebar = (site / HOME).read_text().split('<div class="sidebar-tree">')[1].split("</aside>")[0]
    links = re.findall(r'href="([^"#]+)', sidebar)
    assert page in {HOME, *(os.path.normpath(f"docs/{link}") for link in links)}


def test_the_root_of_the_site_leads_to_its_index(site: Path) -> None:
    (target,) = re.findall(r"url=([\w/.]+)", (site / "index.html").read_text())
    assert target == HOME


def test_the_api_reference_has_each_public_name_that_is_not_deepspeeds(site: Path) -> None:
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    documented = {name.split(".")[-1] for kind in inventory.data.values() for name in kind}
    recorded = json.loads((ROOT / "tests/data/deepspeed_surface.json").read_text())
    from_deepspeed = {name.removeprefix("deepspeed.") for name in recorded}
    public = {name: getattr(spmdzero, name) for name in spmdzero.__all__}
    ours = {n for n, found in public.items() if inspect.isfunction(found) or inspect.isclass(found)}
    assert ours - from_deepspeed - documented == set()
    assert {"initialize", "Engine"} <= documented


def test_no_section_of_a_docstring_stands_raw_in_the_api_reference(site: Path) -> None:
    # Napoleon's own words, where no blank line before "Raises:" ends the paragraph above it.
    page = (site / "docs" / "api.html").read_text()
    assert re.findall(r":(?:raises?|param|returns?|type|rtype|ivar)\b[^:<]*:.*", page) == []


def test_a_long_key_in_a_table_may_break_and_leaves_room_for_its_meaning(site: Path) -> None:
    page = (site / "docs/config.html").read_text()
    assert "train_<wbr>micro_<wbr>batch_<wbr>size_<wbr>per_<wbr>gpu" in page
    assert "_static/site.css" in page
    assert (site / "_static/site.css").is_file()


def test_printed_tables_keep_their_columns_and_other_printed_lines_wrap(site: Path) -> None:
    printed = (
        r'<div class="([^"]*)highlight-text notranslate"><div class="highlight"><pre>.*?</pre>'
    )
    for page in ("docs/ledger.html", "docs/config.html"):
        for block in re.finditer(printed, (site / page).read_text(), re.DOTALL):
            assert ("lined" in block[1]) == ("─" in block[0]), block[0]
    assert "lined highlight-text" in (site / "docs/ledger.html").read_text()


def test_the_landing_pages_picture_is_the_notebooks() -> None:
    # `make notebooks` writes both.
    assert PICTURE.read_bytes() == drawn()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=named)
def test_a_notebooks_figures_are_on_its_page(site: Path, notebook: Path) -> None:
    assert '<img alt="' in (site / named(notebook.with_suffix(".html"))).read_text()
