"""The package's version, under the names that DeepSpeed's package has."""

import re

from spmdzero.compat import git_version_info

_NUMBERS = ("__version_major__", "__version_minor__", "__version_patch__")
VERSION_NAMES = ("__version__", *_NUMBERS, "__git_hash__", "__git_branch__")
"""The names that `version_named` knows."""


def version_named(name: str) -> str | int:
    """The version, one of its numbers, or git's hash or branch."""
    if name.startswith("__git"):
        return getattr(git_version_info, name.strip("_"))
    # This import is late, as reading the metadata takes as long as importing the package.
    from importlib.metadata import version

    whole = version("spmdzero")
    if name == "__version__":
        return whole
    return int(re.findall(r"\d+", whole)[_NUMBERS.index(name)])
