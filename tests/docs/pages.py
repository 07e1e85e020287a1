"""The pages, their fenced blocks, and the files that they tell the reader to save."""

import re
from pathlib import Path
from typing import NamedTuple

import spmdzero
from tests.support.processes import environment

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
# What a page's code and commands run in, where a command does not say so itself.
DEVICES = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}


class Block(NamedTuple):
    """A fenced block; `saved_as` is the file name in the paragraph before it, if any."""

    language: str
    text: str
    line: int
    saved_as: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for fence in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        *_, paragraph = text[: fence.start()].rstrip("\n").rsplit("\n\n", 1)
        name = re.search(r"[Ss]ave this as `([\w./]+)`", paragraph)
        line = text.count("\n", 0, fence.start())
        # A comment before a block names it, for a test that reads it.
        language = "named" if paragraph.startswith("<!--") else fence[1]
        found.append(Block(language, fence[2], line, name[1] if name else None))
    return found


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def save_files(page: Path, folder: Path) -> None:
    """Does what the page tells the reader to do with an editor."""
    for block in blocks(page):
        if block.saved_as:
            (folder / block.saved_as).write_text(block.text)


def page_environment(**more: str) -> dict[str, str]:
    """Of a child that runs in another folder, with the spmdzero that is tested: `make test-pythons`
    tests an installed one.
    """
    return environment(PYTHONPATH=str(Path(spmdzero.__file__).parents[1])) | DEVICES | more
