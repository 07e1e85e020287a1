"""What installed clients import and read of `deepspeed`, by their sources, is here or refused.

A new version of a client that asks for more shows here by name.
"""

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._install import NAME

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

CLIENTS = ("accelerate", "lightning", "peft", "transformers", "trl")
# Names that DeepSpeed 0.19.8 hasn't either, and who lives with that.
NOWHERE = {
    "deepspeed.utils.is_initialized": "transformers' ESMFold, which catches the error",
}


def chain(node: ast.expr) -> list[str]:
    """``["a", "b", "c"]`` for the expression ``a.b.c``, and nothing for others."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def is_deepspeeds(module: str | None) -> bool:
    return (module or "").split(".")[0] == NAME


def references(tree: ast.AST) -> Iterator[str]:
    """Dotted names below `deepspeed` that a source imports, or reads of what it has imported."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname) for alias in node.names]
            theirs = {name: local for name, local in names if is_deepspeeds(name)}
            known |= {local or NAME: name if local else NAME for name, local in theirs.items()}
            yield from theirs
        elif isinstance(node, ast.ImportFrom) and not node.level and is_deepspeeds(node.module):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield known[alias.asname or alias.name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = chain(node) or [""]
            if first in known:
                yield ".".join((known[first], *rest))


def asked_by(client: str) -> dict[str, str]:
    """Name -> one of the files of the client that ask for it."""
    spec = importlib.util.find_spec(client)
    if spec is None:
        pytest.skip(f"{client} is not installed")
    found: dict[str, str] = {}
    for folder in spec.submodule_search_locations or ():
        for path in Path(folder).rglob("*.py"):
            text = path.read_text()
            # Tests of the client's own come with accelerate.
            if "deepspeed" in text and "test_utils" not in path.parts:
                names = references(ast.parse(text))
                found |= {name: str(path) for name in names if name not in NOWHERE}
    return found


def outcome(name: str) -> str:
    """``"here"``, or the reason for a refusal, or that there is no such name."""
    below = name.split(".")[1:]
    found = importlib.import_module("spmdzero")
    for depth, part in enumerate(below, start=1):
        try:
            if not hasattr(found, part):
                importlib.import_module(".".join(("spmdzero", *below[:depth])))
            found = getattr(found, part)
        except SpmdZeroUsageError as refusal:
            return str(refusal)
        except (AttributeError, ImportError):
            return "missing"
    return "here"


@pytest.mark.parametrize("client", CLIENTS)
def test_names_that_a_client_asks_for_are_here_or_refused(client: str) -> None:
    asked = asked_by(client)
    assert "deepspeed.zero.GatheredParameters" in asked
    assert {name: file for name, file in asked.items() if outcome(name) == "missing"} == {}


def test_names_are_found_in_all_forms_in_which_sources_ask() -> None:
    source = """
import deepspeed.runtime.engine as engine, os, deepspeed.comm
def late():
    import deepspeed
    from deepspeed.utils import groups as g, logger
    from .deepspeed import theirs
    return deepspeed.zero.Init, g.rank(), engine.Engine.x, os.path, logger
class deepspeed_like: pass
"""
    assert set(references(ast.parse(source))) == {
        "deepspeed",
        "deepspeed.comm",
        "deepspeed.runtime.engine",
        "deepspeed.runtime.engine.Engine",
        "deepspeed.runtime.engine.Engine.x",
        "deepspeed.utils.groups",
        "deepspeed.utils.groups.rank",
        "deepspeed.utils.logger",
        "deepspeed.zero",
        "deepspeed.zero.Init",
    }


def test_a_name_is_here_refused_or_missing() -> None:
    assert outcome("deepspeed.zero.Init") == "here"
    assert outcome("deepspeed.runtime.engine.DeepSpeedEngine") == "here"
    assert outcome("deepspeed.runtime.sequence_parallel.ulysses_sp") == "here"
    assert outcome("deepspeed.ops.adam.DeepSpeedCPUAdam.step") == "here"
    assert "no processor of the host" in outcome("deepspeed.ops.adam.ZenFlowCPUAdam.step")
    assert outcome("deepspeed.zero.no_such") == "missing"
    assert outcome("deepspeed.no_such.module") == "missing"
