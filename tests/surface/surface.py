"""DeepSpeed's recorded names beside ours: what is there, what is refused, what is neither."""

import importlib
import inspect
import json
from pathlib import Path
from typing import Any, Literal

from spmdzero.compat.refusals import REFUSALS

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "deepspeed_surface.json").read_text()
)
# Names whose parameters are our own, and why.
OTHER_PARAMETERS = {
    "deepspeed.DeepSpeedEngine": "made by initialize, never by hand",
    "deepspeed.PipelineEngine": "made by initialize, never by hand",
    "deepspeed.DeepSpeedOptimizer": "made by initialize, never by hand",
    "deepspeed.accelerator.DeepSpeedAccelerator": "made by get_accelerator",
    "deepspeed.utils.tensor_fragment": "a module here; the class of that name is a flat buffer's",
    "deepspeed.DeepSpeedConfigError": "an exception; the message is its own",
}


def status(name: str) -> Literal["here", "refused", "missing"]:
    """What became of one of DeepSpeed's names."""
    if name.removeprefix("deepspeed.") in REFUSALS:
        return "refused"
    try:
        find(name)
    except AttributeError:
        return "missing"
    return "here"


def find(name: str) -> Any:
    """Our object of a recorded name.

    Raises:
        AttributeError: there is none.
    """
    parts = name.split(".")[1:]
    found = importlib.import_module("spmdzero")
    for depth, part in enumerate(parts):
        if inspect.isclass(found):
            # Engine and accelerator: what the class says, not what an instance would compute.
            return inspect.getattr_static(found, part)
        try:
            found = getattr(found, part)
        except AttributeError:
            path = "spmdzero." + ".".join(parts[: depth + 1])
            try:
                found = importlib.import_module(path)
            except ModuleNotFoundError:
                raise AttributeError(path) from None
    return found


def parameters(value: Any) -> list[list[str]]:
    """Name, kind and default of each parameter, as tests/surface/record.py writes them."""
    return [
        [name, p.kind.name, "" if p.default is p.empty else repr(p.default)]
        for name, p in inspect.signature(value).parameters.items()
    ]
