"""The commands of the pages are true: they run, and print what the pages show.

A page's `bash` blocks run in order, in a folder with the files that the page tells to save. `make`
and the repository's own scripts would run for minutes: they must exist.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks, followers, named, page_environment, save_files, shows

from spmdzero.backend import current
from tests.support.selected import outside

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings


def commands(page: Path) -> str:
    return "".join(block.text for block in blocks(page) if block.language == "bash")


README = ROOT / "README.md"
PAGES_WITH_COMMANDS = [
    pytest.param(page, id=named(page), marks=outside([README], page))
    for page in PAGES
    if commands(page)
]
PROGRAMS = {
    "python": [sys.executable],
    "spmdzero": [sys.executable, "-m", "spmdzero"],
    # What the entry point of spmdzero-deepspeed calls, where the name is still DeepSpeed's.
    "deepspeed": [sys.executable, "-m", "spmdzero.launcher.runner"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"],
}
# It starts a Python of its own, which finds there what spmdzero-deepspeed installs.
DISTRIBUTION = ROOT / "spmdzero" / "integrations" / "deepspeed_distribution"


def exists(words: list[str]) -> bool:
    """Whether a command that is not run here names something that is there."""
    program, *arguments = words
    if program == "make":
        targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return arguments[0] in targets
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        known = extras["optional-dependencies"]
        ours = (re.fullmatch(r"(?:\.|spmdzero)\[([\w,]+)\]", word) for word in arguments)
        asked = [name for found in ours if found for name in found[1].split(",")]
        folders = [word for word in arguments if word.startswith(".") and "[" not in word]
        return (
            arguments[0] == "install"
            and all(name in known for name in asked)
            and all((ROOT / folder / "pyproject.toml").is_file() for folder in folders)
        )
    if program == "spmdzero":
        told = subprocess.run(
            [*PROGRAMS[program], arguments[0], "--help"],
            env=page_environment(), capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        options = [word for word in arguments if word.startswith("--")]
        return told.returncode == 0 and all(option in told.stdout for option in options)
    if program == "python" and arguments[:2] == ["-m", "pytest"]:
        return (ROOT / arguments[2]).exists()
    if program == "python" and arguments[0] == "-m":
        return (ROOT / arguments[1].replace(".", "/")).with_suffix(".py").is_file()
    return program == "python" and (ROOT / arguments[0]).is_file()


def run(line: str, folder: Path) -> str:
    """What a command prints; nothing for one that only has to exist."""
    words = shlex.split(line, comments=True)
    given = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        given[name] = value
    if words[0] == "accelerate":
        paths = f"{DISTRIBUTION}{os.pathsep}{page_environment()['PYTHONPATH']}"
        given |= {"PYTHONPATH": paths, "USE_TORCH_XLA": "false"}
    is_here = words[0] in PROGRAMS.keys() - {"python"} or (
        words[0] == "python" and (folder / words[1]).is_file()
    )
    example = next((word for word in words if word.startswith("examples/")), None)
    if example is not None:
        # It trains for minutes. `tests/examples` runs it shorter.
        is_here, words = False, ["python", example]
    if "--hostfile" in words:
        # It starts processes on other machines, whose names the reader has.
        is_here = False
    if not is_here:
        assert exists(words), f"{line}: there is no such thing"
        return ""
    done = subprocess.run(
        [*PROGRAMS[words[0]], *words[1:]],
        cwd=folder, env=page_environment(**given), capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    # A file with a refused key is what a page shows, and has status 1.
    fine = (0, 1) if words[:2] == ["spmdzero", "check"] else (0,)
    assert done.returncode in fine, f"{line}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS)
def test_the_commands_of_a_page_run_and_print_what_the_page_shows(page: Path, tmp_path: Path):
    save_files(page, tmp_path)
    found = blocks(page)
    for block, after in zip(found, followers(found), strict=True):
        if block.language != "bash":
            continue
        if "--tpu" in block.text and current().lowering is None:
            # torch_xla's backend refuses it.
            continue
        printed, where = "", f"{named(page)}:{block.line + 1}"
        for line in joined(block.text):
            printed += run(line, tmp_path)
        assert all(shows(text, printed) for text in after), f"{where} prints\n{printed}"


def joined(script: str) -> list[str]:
    """The commands of a block, those over several lines as one."""
    return [line for line in script.replace("\\\n", " ").splitlines() if line]


def test_a_command_that_names_nothing_is_found_out():
    assert exists(["make", "test"])
    assert exists(shlex.split("spmdzero launch --hostfile hosts train.py"))
    for line in (
        "make tset",
        "spmdzero launch --hostfiles hosts train.py",
        "pip install '.[nothing]'",
        "pip install '.[nothing]' 'jax[tpu]'",
        "python -m pytest tests/engin",
        "pip install ./nothing",
        "python -m tests.nothing",
        "python a.py",
    ):
        assert not exists(shlex.split(line)), line
