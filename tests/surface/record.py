"""Writes tests/data/deepspeed_surface.json: names and parameters of DeepSpeed's public API.

Needs real DeepSpeed: `DS_ACCELERATOR=cpu python tests/surface/record.py` where the `bench` extra is
installed.
"""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

PATH = Path(__file__).parents[1] / "data" / "deepspeed_surface.json"
MODULES = [
    "deepspeed",
    "deepspeed.comm",
    "deepspeed.utils",
    "deepspeed.utils.groups",
    "deepspeed.zero",
    "deepspeed.checkpointing",
    "deepspeed.accelerator",
    "deepspeed.ops.adam",
    "deepspeed.ops.lamb",
    "deepspeed.ops.lion",
    "deepspeed.ops.adagrad",
    "deepspeed.runtime.lr_schedules",
    "deepspeed.runtime.dataloader",
    "deepspeed.checkpoint.utils",
]
# Methods of these are recorded one by one.
CLASSES = {
    "deepspeed.DeepSpeedEngine": deepspeed.DeepSpeedEngine,
    "deepspeed.accelerator.DeepSpeedAccelerator": DeepSpeedAccelerator,
}


def parameters(value: Any) -> list[list[str]] | None:
    """Name, kind and default of each parameter; None for what has no signature of its own."""
    try:
        signature = inspect.signature(_unwrapped(value))
    except (TypeError, ValueError):
        return None
    return [
        [name, p.kind.name, "" if p.default is p.empty else written(p.default)]
        for name, p in signature.parameters.items()
    ]


def _unwrapped(value: Any) -> Any:
    """The function inside of DeepSpeed's timing decorators, which hide its signature."""
    cells = getattr(value, "__closure__", None) or ()
    names = getattr(getattr(value, "__code__", None), "co_freevars", ())
    inner = dict(zip(names, cells, strict=True)).get("func")
    return inner.cell_contents if inner is not None else value


def written(default: Any) -> str:
    """A default as text that is the same in every run."""
    text = repr(default)
    return f"<{type(default).__name__}>" if " at 0x" in text else text


def kind(value: Any) -> str:
    if inspect.isclass(value):
        return "class"
    if inspect.ismodule(value):
        return "module"
    return "function" if callable(value) else "value"


def is_public(module: Any, value: Any) -> bool:
    """Whether a module offers it: modules also show what they import, packages offer that."""
    if inspect.ismodule(value):
        # Of the top level's, generated files and constants are nobody's to import.
        package = value.__name__.startswith("deepspeed.") and hasattr(value, "__path__")
        return module is deepspeed and (package or value is deepspeed.checkpointing)
    origin = getattr(value, "__module__", "deepspeed")
    if value is deepspeed.get_accelerator and module not in (deepspeed, deepspeed.accelerator):
        return False  # every module imports it
    within = "deepspeed" if hasattr(module, "__path__") else module.__name__
    return origin.startswith(within)


def record() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for path in MODULES:
        module: Any = deepspeed
        for part in path.split(".")[1:]:
            module = getattr(module, part, None) or importlib.import_module(path)
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or not (callable(value) or inspect.ismodule(value)):
                continue
            if is_public(module, value):
                found[f"{path}.{name}"] = {"kind": kind(value), "parameters": parameters(value)}
    for path, cls in CLASSES.items():
        for name in sorted(vars(cls)):
            if name.startswith("_"):
                continue
            value = inspect.getattr_static(cls, name)
            if isinstance(value, property):
                found[f"{path}.{name}"] = {"kind": "property", "parameters": None}
            elif callable(value) or isinstance(value, staticmethod | classmethod):
                method = getattr(cls, name)
                found[f"{path}.{name}"] = {"kind": "method", "parameters": parameters(method)}
    return dict(sorted(found.items()))


if __name__ == "__main__":
    lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in record().items())
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
