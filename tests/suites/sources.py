"""Fetches files of other projects at a commit, and bends them for devices that aren't GPUs."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomllib

HERE = Path(__file__).parent
FETCHED = HERE.parents[1] / ".suites"
# Where repositories come from; a folder of clones is another place to fetch them from, as
# SUITES_FROM=/folder/{repository}.
_FROM = os.environ.get("SUITES_FROM", "https://github.com/{repository}")


@dataclasses.dataclass(frozen=True)
class Bend:
    """A rule that changes a client's test.

    Attributes:
        files: patterns of paths in the repository.
        find: a regular expression of whole lines' parts, where `^` and `$` are those of a line.
        put: what stands there instead.
        why: the reason.
    """

    files: list[str]
    find: str
    put: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Files of a repository.

    Attributes:
        name: its folder below `FETCHED`.
        commit: what is fetched.
        near: the release that the commit belongs to, or is nearest to.
        paths: what of the repository is kept.
        bends: the rules.
    """

    name: str
    repository: str
    commit: str
    near: str
    paths: list[str]
    bends: list[Bend] = dataclasses.field(default_factory=list)

    @property
    def root(self) -> Path:
        """The folder of what was fetched."""
        return FETCHED / self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite(Source):
    """The tests of a client.

    Attributes:
        runs: words that pytest is given, each in a process of its own.
        folder: where pytest runs, below the repository.
        imports: folders of the repository that imports are found in.
        packages: what the tests import beside the extra `test`, with versions.
        plugins: of pytest, in `in_pytest`.
        variables: of the environment.
    """

    runs: list[str]
    folder: str = "."
    imports: list[str] = dataclasses.field(default_factory=list)
    packages: list[str] = dataclasses.field(default_factory=list)
    plugins: list[str] = dataclasses.field(default_factory=list)
    variables: dict[str, str] = dataclasses.field(default_factory=dict)


def names() -> list[str]:
    """The suites that there are."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def read(name: str) -> Suite:
    """Reads `NAME.toml`."""
    return Suite(name=name, **_told(HERE / f"{name}.toml"))


def read_source(path: Path) -> Source:
    """Reads what a file of another folder says; its files have a folder of that one's name."""
    return Source(name=f"{path.parent.name}/{path.stem}", **_told(path))


def _told(path: Path) -> dict[str, Any]:
    told = tomllib.loads(path.read_text())
    return told | {"bends": [Bend(**bend) for bend in told.get("bends", [])]}


def fetch(source: Source) -> None:
    """Makes the files anew, as they are at the commit, and bends them.

    Raises:
        ValueError: a rule finds nothing.
    """
    if not (source.root / ".git").exists():
        source.root.mkdir(parents=True, exist_ok=True)
        _git(source, "init", "-q")
    if _git(source, "cat-file", "-t", source.commit, check=False) != 0:
        place = _FROM.format(repository=source.repository)
        print(f"fetching {source.repository} at {source.commit} from {place}", flush=True)
        # Files are fetched when they are checked out.
        _git(source, "remote", "remove", "origin", check=False)
        _git(source, "remote", "add", "origin", place)
        _git(source, "fetch", "-q", "--depth", "1", "--filter=blob:none", "origin", source.commit)
    _git(source, "checkout", "-q", "-f", source.commit, "--", *source.paths)
    for bend in source.bends:
        found = 0
        for path in [path for pattern in bend.files for path in source.root.glob(pattern)]:
            text, count = re.subn(bend.find, bend.put, path.read_text(), flags=re.MULTILINE)
            path.write_text(text)
            found += count
        if found == 0:
            raise ValueError(f"{source.name}: nothing in {bend.files} is {bend.find!r}")


def install(suite: Suite) -> Path:
    """Installs what the suite's tests import besides into a folder of their own, and names it."""
    folder = FETCHED / "packages" / suite.name
    done = folder / "installed"
    wanted = "\n".join(suite.packages)
    if suite.packages and (not done.exists() or done.read_text() != wanted):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder), *suite.packages], check=True)
        done.write_text(wanted)
    return folder


def _git(source: Source, *words: str, check: bool = True) -> int:
    command = ["git", "-C", str(source.root), *words]
    quiet = None if check else subprocess.DEVNULL
    return subprocess.run(command, check=check, stdout=quiet, stderr=quiet).returncode
