"""Fetches a client's tests at a commit, and bends them for devices that aren't GPUs."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

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


@dataclasses.dataclass(frozen=True)
class Suite:
    """The tests of a client.

    Attributes:
        commit: what is fetched.
        near: the release that the commit belongs to, or is nearest to.
        paths: what of the repository is kept.
        runs: paths that pytest is given, each in a process of its own.
        folder: where pytest runs, below the repository.
        imports: folders of the repository that imports are found in.
        packages: what the tests import beside the extra `test`, with versions.
        variables: of the environment.
        bends: the rules.
    """

    name: str
    repository: str
    commit: str
    near: str
    paths: list[str]
    runs: list[str]
    folder: str = "."
    imports: list[str] = dataclasses.field(default_factory=list)
    packages: list[str] = dataclasses.field(default_factory=list)
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    bends: list[Bend] = dataclasses.field(default_factory=list)

    @property
    def root(self) -> Path:
        """The folder of what was fetched."""
        return FETCHED / self.name


def names() -> list[str]:
    """The suites that there are."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def read(name: str) -> Suite:
    """Reads `NAME.toml`."""
    told = tomllib.loads((HERE / f"{name}.toml").read_text())
    bends = [Bend(**bend) for bend in told.pop("bends", [])]
    return Suite(name=name, bends=bends, **told)


def fetch(suite: Suite) -> None:
    """Makes the suite's files anew, as they are at its commit, and bends them.

    Raises:
        ValueError: a rule finds nothing.
    """
    if not (suite.root / ".git").exists():
        suite.root.mkdir(parents=True, exist_ok=True)
        _git(suite, "init", "-q")
    if _git(suite, "cat-file", "-t", suite.commit, check=False) != 0:
        source = _FROM.format(repository=suite.repository)
        print(f"fetching {suite.repository} at {suite.commit} from {source}", flush=True)
        # Files are fetched when they are checked out.
        _git(suite, "remote", "remove", "origin", check=False)
        _git(suite, "remote", "add", "origin", source)
        _git(suite, "fetch", "-q", "--depth", "1", "--filter=blob:none", "origin", suite.commit)
    _git(suite, "checkout", "-q", "-f", suite.commit, "--", *suite.paths)
    for bend in suite.bends:
        found = 0
        for path in [path for pattern in bend.files for path in suite.root.glob(pattern)]:
            text, count = re.subn(bend.find, bend.put, path.read_text(), flags=re.MULTILINE)
            path.write_text(text)
            found += count
        if found == 0:
            raise ValueError(f"{suite.name}: nothing in {bend.files} is {bend.find!r}")


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


def _git(suite: Suite, *words: str, check: bool = True) -> int:
    command = ["git", "-C", str(suite.root), *words]
    quiet = None if check else subprocess.DEVNULL
    return subprocess.run(command, check=check, stdout=quiet, stderr=quiet).returncode
