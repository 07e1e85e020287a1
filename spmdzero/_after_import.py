"""Calls functions with a module as soon as it is imported."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import cast


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls `action` with the module `name`, at once if it is imported, else after its import."""
    known = sys.modules.get(name)
    if known is not None:
        action(known)
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action
        self._asks = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders find, with a loader that calls the action."""
        if fullname != self._name or self._asks:
            return None
        # Code that only asks whether the module exists comes here too: the finder stays until an
        # import.
        self._asks = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self.act)
        return spec

    def act(self, module: ModuleType) -> None:
        """Calls the action, and removes this finder."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._action(module)


class _Then(Loader):
    def __init__(self, loader: Loader, action: Callable[[ModuleType], None]) -> None:
        self._loader, self._action = loader, action

    def get_code(self, fullname: str) -> CodeType | None:
        """The code that `python -m` runs, without an import and thus without the action."""
        return cast(InspectLoader, self._loader).get_code(fullname)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Creates the module as the real loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module as the real loader does, then calls the action."""
        # Code that reads a package's files needs methods of the loader that this one doesn't have.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)
