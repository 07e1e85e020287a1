"""ZeRO as sharding annotations: DeepSpeed's engine on PyTorch/XLA SPMD."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from spmdzero import _cuda, _display, _torch_tpu
from spmdzero._after_import import after_import
from spmdzero._logging import show_log_lines
from spmdzero.compat._old_paths import FIRST_LEVEL, attribute, keep_old_paths
from spmdzero.compat._versions import VERSION_NAMES, version_named

if TYPE_CHECKING:
    from spmdzero._public import *  # noqa: F403

    __version__: str

show_log_lines()
keep_old_paths()
_torch_tpu.keep_out()
after_import("torch", _cuda.explain)
# What draws imports what it draws, so no object imports it.
_display.draw_with(lambda: importlib.import_module("spmdzero.show"))


class _Package(ModuleType):
    """The class of this package, which keeps `audit` and `explain` as functions.

    Subpackages have these names too, and importlib sets an imported module as an attribute of its
    package at any time.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("audit", "explain") or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Imports everything when a name is first used, so that the command line can avoid torch."""
    if name in VERSION_NAMES:
        return version_named(name)
    if name == "__all__" or not name.startswith("__"):
        # If `_public` is just being imported, it has no `__all__` yet.
        public = importlib.import_module("spmdzero._public")
        if hasattr(public, "__all__"):
            paths = {path: importlib.import_module(f"spmdzero.{path}") for path in FIRST_LEVEL}
            names = {each: getattr(public, each) for each in public.__all__} | paths
            globals().update(names, __all__=sorted(names), dist=public.comm)
        if name in globals():
            return globals()[name]
    return attribute("", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
