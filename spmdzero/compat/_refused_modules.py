"""`import spmdzero.moe.layer`: the reason and the alternative, in place of "No module named"."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from spmdzero.compat.refusals import REFUSALS, why_refused
from spmdzero.errors import RefusedImportError


class _RefusedModules(MetaPathFinder):
    """Asked for what no other finder has found; knows the refused modules of this package only."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        package, _, rest = fullname.partition(".")
        refused = _refused_prefix(rest) if package == "spmdzero" else None
        if refused is None:
            return None
        error = RefusedImportError(f"deepspeed.{rest}: {why_refused(refused)}")
        error.name = fullname
        raise error


def _refused_prefix(path: str) -> str | None:
    """The name of the table that a path below `deepspeed` is, or is inside of."""
    parts = path.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if prefix in REFUSALS), None)


def refuse_modules() -> None:
    """Makes importing a refused module an error that says why."""
    sys.meta_path.append(_RefusedModules())
