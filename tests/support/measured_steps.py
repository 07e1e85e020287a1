"""The steps that others measured: what was published of them, and what the compiler makes of them.

`tests/data/measured_steps.json` has programs, written by hand in JAX for this comparison and
compiled for their topology, and rows, each a measured step. A program's estimate is kept in three
parts: its layers, what stands before and behind them, and the optimizer. A row whose step is that
of a program with a different number of rows, layers, devices or words follows from the parts.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spmdzero.explain import Topology
from spmdzero.explain._calibration import CLASSES, MeasuredStep
from spmdzero.explain._timeline import Spent

DATA = Path(__file__).parents[1] / "data" / "measured_steps.json"
PARTS = ("layers", "ends", "optimizer")
Parts = dict[str, dict[str, float]]


def load() -> dict[str, Any]:
    """What the file has."""
    return json.loads(DATA.read_text())


def measured_steps(told: Mapping[str, Any] | None = None) -> list[MeasuredStep]:
    """The rows whose programs were compiled."""
    told = told or load()
    found = []
    for row in told["rows"]:
        program = told["programs"][row["program"]]
        if "parts" not in program:
            continue
        recipe = program["recipe"] | row.get("but", {})
        topology = Topology.parse(row["topology"])
        found.append(
            MeasuredStep(
                name=row["name"],
                generation=topology.chip.name,
                devices=topology.devices,
                seconds=seconds_of(row, recipe),
                classes=classes_of(program, recipe, topology),
                group=row["program"],
                source=row["source"],
            )
        )
    return found


def not_compiled() -> list[str]:
    """The names of the rows whose programs were not compiled."""
    told = load()
    without = {name for name, program in told["programs"].items() if "parts" not in program}
    return [
        f"{row['name']}, {row['topology'].partition(':')[0]}"
        for row in told["rows"]
        if row["program"] in without
    ]


def seconds_of(row: Mapping[str, Any], recipe: Mapping[str, Any]) -> float:
    """The measured seconds of a row, of which some publish tokens or operations a second."""
    if "seconds" in row:
        return row["seconds"]
    if "tokens_per_second" in row:
        return recipe["rows"] * recipe["length"] / row["tokens_per_second"]
    return model_operations(recipe) / (1e12 * row["tera_operations_per_second"])


def model_operations(recipe: Mapping[str, Any]) -> float:
    """Operations of a device's step as MaxText counted them before July 2025.

    They are 6 for each weight and token, and attention as if no mask hid anything.
    """
    tokens = recipe["rows"] * recipe["length"]
    heads = recipe["heads"] * recipe.get("head_size", 128)
    pairs = tokens * recipe["length"] * heads * recipe["layers"]
    return 6 * tokens * parameters(recipe) + 12 * pairs


def parameters(recipe: Mapping[str, Any]) -> int:
    """Number of a decoder's weights, without those of its norms."""
    width, size = recipe["width"], recipe.get("head_size", 128)
    attention = 2 * width * size * (recipe["heads"] + recipe["kv_heads"])
    layer = attention + 3 * width * recipe["inner"] * max(recipe.get("experts", 0), 1)
    tables = 1 if recipe.get("tied") else 2
    return recipe["layers"] * layer + tables * width * recipe["vocabulary"]


def classes_of(
    program: Mapping[str, Any], recipe: Mapping[str, Any], topology: Topology
) -> dict[str, float]:
    """Seconds by class of a step that differs from a program in numbers alone."""
    own, there = program["recipe"], Topology.parse(program["topology"])
    rows = recipe["rows"] / own["rows"]
    layers = recipe["layers"] / own["layers"]
    words = recipe["vocabulary"] / own["vocabulary"]
    # Of what is gathered, a device has its own shard already.
    sent = (1 - 1 / topology.devices) / (1 - 1 / there.devices)
    held = parameters(recipe) / parameters(own) * there.devices / topology.devices
    held *= _bytes(recipe) / _bytes(own)
    by_part = {
        "layers": (rows * layers, sent * layers),
        "ends": (rows * words, sent * words),
        "optimizer": (held, 1.0),
    }
    found = dict.fromkeys(CLASSES, 0.0)
    for part, (computed, moved) in by_part.items():
        for name, seconds in program["parts"][part].items():
            found[name] += seconds * (moved if name in ("wire", "hidden") else computed)
    # Kernels were compiled with smaller blocks, of which a causal mask leaves fewer.
    found["kernels"] *= _seen(recipe, recipe.get("block", 512)) / _seen(
        recipe, program["compiled_block"]
    )
    return found


def _bytes(recipe: Mapping[str, Any]) -> int:
    """Bytes of a weight and its two moments."""
    size = {"float32": 4, "bfloat16": 2}
    weights = size[recipe.get("weights", "float32")]
    return 2 * weights + size[recipe.get("moment", "float32")]


def _seen(recipe: Mapping[str, Any], block: int) -> float:
    blocks = recipe["length"] / min(block, recipe["length"])
    return (blocks + 1) / (2 * blocks)


def parts_of(spent: Iterable[Spent]) -> Parts:
    """Seconds by class of each of `PARTS`."""
    found: Parts = {part: dict.fromkeys(CLASSES, 0.0) for part in PARTS}
    for s in spent:
        part = found[_part_of(s.operation.op_names)]
        if s.operation.kernel is not None:
            name = "kernels"
        else:
            name = "products" if s.operation.products else "memory"
        part[name] += s.runs * s.compute
        if s.link == "wire":
            part["wire"] += s.runs * s.waiting
            part["hidden"] += s.runs * (s.transfer - s.waiting)
        elif s.link:
            part["host"] += s.runs * s.waiting
    return found


def _part_of(op_names: Iterable[str]) -> str:
    said = " ".join(op_names)
    if "zero.update" in said:
        return "optimizer"
    # The loss is a loop too, where it is tiled.
    return "layers" if "/while" in said and "cross_entropy" not in said else "ends"
