"""The pages, their fenced blocks, what they show of outputs, and the files that they have saved."""

import re
from collections.abc import Sequence
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
    """A fenced block, and what the paragraph before it says of it.

    Attributes:
        language: of the fence; ``named`` for a block that a comment before it explains.
        text: without the fences.
        line: of the opening fence, from 0.
        saved_as: the file name in "Save this as `train.py`", if it says so.
        backend: the one whose output it is, of a paragraph that ends in "with JAX:"; None: both's.
    """

    language: str
    text: str
    line: int
    saved_as: str | None
    backend: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for fence in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        *_, paragraph = text[: fence.start()].rstrip("\n").rsplit("\n\n", 1)
        name = re.search(r"[Ss]ave this as `([\w./]+)`", paragraph)
        only = re.search(r"\b[Ww]ith (torch_xla|JAX):$", paragraph)
        line = text.count("\n", 0, fence.start())
        # A comment before a block names it, for a test that reads it.
        language = "named" if paragraph.startswith("<!--") else fence[1]
        backend = only[1].lower() if only else None
        found.append(Block(language, fence[2], line, name[1] if name else None, backend))
    return found


def shows(block: Block, printed: str) -> bool:
    """Whether a page's `block` is what is printed, from the first line to the last.

    `...` stands for what the page leaves out, or what differs from machine to machine, as in
    Python's doctests: for any lines where it is a line, else for any part of one.
    """
    lines = block.text.rstrip().splitlines()
    pattern = "".join(
        "(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n"
        for line in lines
    )
    says_something = any(line.strip(" .") for line in lines)
    return says_something and bool(re.fullmatch(pattern, printed.rstrip() + "\n"))


def followers(found: Sequence[Block]) -> list[list[Block]]:
    """For each block the outputs that a page shows of it: the `text` blocks up to the next code."""
    after: list[list[Block]] = [[] for _ in found]
    latest: list[Block] = []
    for block, own in zip(found, after, strict=True):
        if block.language == "text":
            latest.append(block)
        elif block.language in ("python", "bash"):
            latest = own
    return after


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
