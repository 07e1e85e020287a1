"""Paths that scripts import stand for modules of the house: `spmdzero.ops.adam` and its like."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# First name below `spmdzero` in a script -> the package that it stands for.
_STANDS_FOR = {
    **{
        name: f"spmdzero.compat.{name}"
        for name in (
            "accelerator",
            "checkpoint",
            "checkpointing",
            "comm",
            "launcher",
            "ops",
            "refusals",
            "runtime",
            "utils",
            "zero",
        )
    },
    "store": "spmdzero.formats",
    "xla": "spmdzero.backend.torch_xla",
}


class _SameModule(Loader):
    """Gives the module of the house itself, so that both paths have one state."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._own: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Imports the module that the path stands for."""
        module = importlib.import_module(self._path)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing but to undo what importlib did: the module is that of its own path."""
        module.__spec__ = self._own


class _OldPaths(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        first, dot, below = rest.partition(".")
        if package != "spmdzero" or first not in _STANDS_FOR:
            return None
        real = f"{_STANDS_FOR[first]}{dot}{below}"
        try:
            if importlib.util.find_spec(real) is None:
                return None
        except ModuleNotFoundError:
            return None
        return ModuleSpec(fullname, _SameModule(real))


def keep_old_paths() -> None:
    """Makes the paths importable."""
    sys.meta_path.insert(0, _OldPaths())
