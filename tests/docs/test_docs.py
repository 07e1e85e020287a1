"""The pages are true: their code runs, their output is what it prints, their tables are the code's.

A page's Python blocks run in order, in one process with 8 virtual devices. A `text` block is all
that the Python block before it prints, by the rule of `pages.shows`; what is printed has one.
"""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import render_config
from pages import (
    PAGES,
    ROOT,
    Block,
    blocks,
    followers,
    named,
    page_environment,
    save_files,
    shows,
)

from spmdzero.backend import current
from spmdzero.config import NO_MEANING, OPTIMIZERS, SCHEDULES, load_config
from spmdzero.config._models import SECTIONS
from spmdzero.config._must_be_off import OFF_ONLY
from tests.support.warm import run_warm

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

# A line of output that no page would print by itself.
NEXT_BLOCK = "\x1e"

# They train through a client, for half a minute; `tests/integrations` does so too.
CLIENTS = ["docs/accelerate.md", "docs/huggingface.md", "docs/lightning.md"]
JAX_ALONE = {"docs/eight_bits.md"}
"""Pages about what torch_xla refuses."""


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.slow] if named(page) in CLIENTS else []
    return [*marks, pytest.mark.backends("jax")] if named(page) in JAX_ALONE else marks


PAGES_WITH_PYTHON = [
    pytest.param(page, id=named(page), marks=marks_of(page))
    for page in PAGES
    if any(b.language == "python" for b in blocks(page))
]


def run(program: Path, cwd: Path) -> str:
    done = run_warm(str(program), cwd=cwd, environment=page_environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(page: Path, tmp_path: Path):
    found = blocks(page)
    lines = [""] * page.read_text().count("\n")
    for block in found:
        if block.language == "python":
            # Each line where the page has it, so that a traceback gives the page's line.
            lines[block.line] = f"print({NEXT_BLOCK!r})"
            body = block.text.splitlines()
            lines[block.line + 1 : block.line + 1 + len(body)] = body
    save_files(page, tmp_path)
    # No page's program may stand in the way of the package that it is about.
    program = tmp_path / f"page_{page.stem}.py"
    program.write_text("\n".join(lines))
    _, *printed = run(program, tmp_path).split(NEXT_BLOCK + "\n")

    outputs = iter(printed)
    for block, after in zip(found, followers(found), strict=True):
        if block.language != "python":
            continue
        said, where = next(outputs), f"{named(page)}:{block.line + 1}"
        # A file that is saved prints where it is run, which test_commands.py compares.
        assert after or block.saved_as or not said, f"{where} prints what isn't shown:\n{said}"
        ours = [text for text in after if text.backend in (None, current().name)]
        assert len(ours) == bool(after), f"{where} has {len(ours)} outputs with this backend"
        assert all(shows(text, said) for text in ours), f"{where} doesn't print that, but\n{said}"


def test_a_page_that_leaves_something_out_says_so():
    def is_shown(text: str, printed: str) -> bool:
        return shows(Block("text", text, 0, None, None), printed)

    assert is_shown("a\nb\n", "a\nb\n\n")
    assert is_shown("...\nb\n", "a\na\nb\n")
    assert is_shown("took ... s\n", "took 1.5 s\n")
    for text, printed in (
        ("b\n", "a\nb\n"),
        ("a\n", "a\nb\n"),
        ("took ... s\n", "took\n1.5 s\n"),
        ("...\n", "a\n"),
        ("", ""),
        ("a.c\n", "abc\n"),
    ):
        assert not is_shown(text, printed), text


def test_each_block_of_a_page_is_of_a_kind_that_is_checked():
    # Sphinx brings it; in the environment of a fresh install there is none.
    markdown = pytest.importorskip("markdown_it")
    for page in PAGES:
        # An output below no code has nothing that it could be compared with.
        outputs = sum(block.language == "text" for block in blocks(page))
        assert sum(map(len, followers(blocks(page)))) == outputs, named(page)
        # A block that is indented, or whose fence says nothing, would be looked at by no test.
        for token in markdown.MarkdownIt().parse(page.read_text()):
            where = f"{named(page)}:{token.map and token.map[0] + 1}"
            assert token.type != "code_block", f"{where} is indented: fence it"
            assert token.type != "fence" or re.fullmatch(r"\w+|\{[\w-]+\}", token.info), where
    for block in (block for page in PAGES for block in blocks(page)):
        assert block.language in {"python", "bash", "text", "json", "diff", "named"}, block
        # What the page has the reader save is what a command after it reads.
        if block.language == "json" and block.saved_as is None:
            load_config(json.loads(block.text))


def test_the_tables_of_config_md_are_what_the_command_on_it_writes(tmp_path: Path):
    copied = tmp_path / "tests" / "docs" / "render_config.py"
    meanings = copied.with_name("param_meanings.py")
    page = tmp_path / "docs" / "config.md"
    for target in (copied, meanings, page):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / target.relative_to(tmp_path), target)
    run(copied, tmp_path)
    assert render_config.PAGE.read_text() == page.read_text(), (
        "run python tests/docs/render_config.py"
    )


def test_config_md_lists_every_honoured_key_with_its_default():
    page = render_config.PAGE.read_text().split("## Accepted without effect")[0]
    listed = set(re.findall(r"^\| `([\w.]+)` \| (.+?) \|", page, re.MULTILINE))
    params = {"optimizer.params": OPTIMIZERS, "scheduler.params": SCHEDULES}
    models = [*SECTIONS.items(), *((at, m) for at, group in params.items() for m in group.values())]
    honoured = {
        (name if at in params else f"{at}.{name}".lstrip("."), render_config.written(field))
        for at, model in models
        for name, attribute in model.json_keys().items()
        if (field := model.model_fields[attribute])
        if f"{at}.{name}".lstrip(".") not in {*NO_MEANING, *OFF_ONLY, *SECTIONS}
    }
    assert listed == honoured


def test_config_md_has_a_row_for_every_key_of_deepspeed():
    keys = json.loads((ROOT / "tests/data/deepspeed_0_19_8_keys.json").read_text())
    listed = set(re.findall(r"^\| `([\w.]+)` \|", render_config.PAGE.read_text(), re.MULTILINE))

    def has_row(key: str) -> bool:
        parts = key.split(".")
        # A section that is in one class as a whole has one row.
        return any(".".join(parts[:end]) in listed for end in range(1, len(parts) + 1))

    assert [key for key in keys if key not in SECTIONS and not has_row(key)] == []


def test_diff_on_the_deepspeed_page_ends_in_the_code_that_runs():
    page = blocks(ROOT / "docs/coming_from_deepspeed.md")
    found = {block.language: block.text for block in reversed(page)}
    after = [line[1:] for line in found["diff"].splitlines() if not line.startswith("-")]
    assert after == found["python"].splitlines()


def opening(page: Path) -> str:
    """A page's first paragraph."""
    _, paragraph, *_ = page.read_text().split("\n\n", 2)
    return paragraph


def test_a_page_starts_with_what_the_reader_can_do():
    # The landing page starts with what spmdzero does.
    pages = {named(page): opening(page) for page in PAGES if page.parent / "index.md" != page}
    told = re.compile(
        r"(Ask|Bring|Check|Choose|Compare|Find out|Go on|Learn|Let|Look up|Make|Measure|Move|Read"
        r"|Run|Save|See|Set up|Start|Train|Write)\b|.*\b[Yy]ou can\b",
        re.DOTALL,
    )
    assert [page for page, text in pages.items() if not told.match(text)] == []


def test_pages_do_not_all_start_with_the_same_words():
    starts = Counter(" ".join(opening(page).split()[:3]) for page in PAGES)
    assert [words for words, count in starts.items() if count > 2] == []


def test_pages_and_notebooks_import_what_is_public():
    notebooks = (ROOT / "notebooks").glob("*.ipynb")
    for page in [*PAGES, *notebooks]:
        imported = re.findall(r"\b(?:from|import) (spmdzero\S*)(?: import (.*))?", page.read_text())
        names = [f"{module}.{name}" for module, name in imported]
        private = [name for name in names if re.search(r"\bspmdzero\.backend\b|\b_", name)]
        assert private == [], f"{named(page)} imports what isn't public"


def test_a_link_leads_to_a_page_and_a_heading_that_exist():
    for page in PAGES:
        for path, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            target = page.parent / path if path else page
            assert target.is_file(), f"{named(page)}: {path} does not exist"
            text = target.read_text() if anchor else ""
            headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert not anchor or anchor in anchors, f"{named(page)}: {path} has no #{anchor}"
