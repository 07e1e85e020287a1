"""An environment of its own, in which spmdzero-deepspeed is installed from this checkout."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings

PROJECT = ROOT / "spmdzero" / "integrations" / "deepspeed_distribution"


def table(project: Path) -> dict[str, Any]:
    """What the pyproject.toml in a folder says."""
    return tomllib.loads((project / "pyproject.toml").read_text())


class Environment:
    """A virtual environment that sees the packages of this one behind its own.

    Attributes:
        folder: of the environment.
        site: its own packages.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder)
        self.site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        (self.site / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib"))

    def install(self) -> None:
        """By the build backend that the tests' own environment has."""
        self.pip("install", "--no-build-isolation", "--no-index", "--no-deps", str(PROJECT))

    def pip(self, *arguments: str) -> None:
        """Runs this environment's pip, with the packages that stand behind its own."""
        python = str(self.folder / "bin" / "python")
        done = subprocess.run(
            [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
            env=environment(), capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def names(self) -> set[str]:
        """What is installed into it, apart from what was there from the beginning."""
        found = {path.name for path in self.site.iterdir()}
        found |= {path.name for path in (self.folder / "bin").iterdir()}
        return found - {"__pycache__"}

    def run(
        self, program: str, *arguments: str, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs one of its programs, where spmdzero is that of this checkout."""
        told = environment(PYTHONPATH=str(ROOT), **variables)
        told.pop("USE_TORCH_XLA", None)
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=cwd or self.folder,
            env=told,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


def stand_in(site: Path) -> list[Path]:
    """Puts a package `deepspeed` into an environment, as DeepSpeed's wheel does: its folders."""
    package, metadata = site / "deepspeed", site / "deepspeed-0.19.8.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text('"""The other one."""\n')
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
    files = ("deepspeed/__init__.py", f"{metadata.name}/METADATA", f"{metadata.name}/RECORD")
    (metadata / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return [package, metadata]
