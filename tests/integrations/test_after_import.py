"""What is done with a module as soon as it is imported, and no earlier."""

import importlib
import importlib.util
import sys
from importlib.resources import files
from pathlib import Path
from types import ModuleType

import pytest

from spmdzero._after_import import after_import

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")


def test_the_action_waits_for_the_import_and_leaves_the_module_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "followed_here"
    folder.mkdir()
    (folder / "__init__.py").write_text("value = 1")
    (folder / "table.txt").write_text("read")
    monkeypatch.syspath_prepend(tmp_path)
    finders, seen = [*sys.meta_path], list[ModuleType]()
    after_import("followed_here", seen.append)

    # As libraries ask whether another is installed.
    assert importlib.util.find_spec("followed_here") is not None
    assert seen == []
    module = importlib.import_module("followed_here")
    assert seen == [module]
    assert module.value == 1
    assert (files(module) / "table.txt").read_text() == "read"
    assert sys.meta_path == finders
    # Imported by now.
    after_import("followed_here", seen.append)
    assert seen == [module, module]
    del sys.modules["followed_here"]
