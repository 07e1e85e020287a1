"""Hosts that don't have the same, one thing after the other; prints what each of them raises."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# Before the device runtime reads it.
if sys.argv[1:] == ["devices"]:
    os.environ["CPU_NUM_DEVICES"] = str(2 + int(os.environ["RANK"]))

import torch

import spmdzero
from spmdzero.backend import runtime
from tests.hosts.training import Model, config_of, engine_of, rows


def other() -> int:
    """0 on the first host, 1 on the second."""
    return runtime.process_index()


def config() -> None:
    lr = 0.01 + other()
    engine_of({"config": {"optimizer": {"type": "AdamW", "params": {"lr": lr}}}})


def versions() -> None:
    """The second host has another jaxlib, by what its package says of itself."""
    with tempfile.TemporaryDirectory() as folder:
        about = Path(folder, "jaxlib-0.0.1.dist-info", "METADATA")
        about.parent.mkdir()
        about.write_text("Metadata-Version: 2.1\nName: jaxlib\nVersion: 0.0.1\n")
        if other():
            sys.path.insert(0, folder)
        try:
            engine_of({})
        finally:
            if other():
                sys.path.remove(folder)


def structure() -> None:
    model = Model(0.0)
    if other():
        model.extra = torch.nn.Linear(3, 3)
        model.last.bias.requires_grad_(False)
    spmdzero.initialize(model=model, config=config_of({}))


def values() -> None:
    engine_of({"seed": other()})


def buffers() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model[1].running_mean += other()
    spmdzero.initialize(model=model, config=config_of({}))


def first_batch() -> None:
    engine = engine_of({})
    engine(*(tensor[: 4 - other()] for tensor in rows(0)))


def weights() -> None:
    torch.manual_seed(other())
    given = Model(0.0).state_dict()
    with torch.device("meta"):
        model = Model(0.0)
    spmdzero.initialize(model=model, config=config_of({}), weights=given.__getitem__)


def broadcast() -> list[float]:
    engine = engine_of({"seed": other(), "config": {"spmd": {"broadcast": True}}})
    return [engine.train_batch(iter([rows(step)])).item() for step in range(2)]


def same() -> list[float]:
    engine = engine_of({"seed": 0})
    return [engine.train_batch(iter([rows(step)])).item() for step in range(2)]


def devices() -> None:
    engine_of({})


KINDS = (config, versions, structure, values, buffers, first_batch, weights, broadcast, same)


def main() -> None:
    found: dict[str, Any] = {}
    for kind in (devices,) if sys.argv[1:] == ["devices"] else KINDS:
        try:
            found[kind.__name__] = kind()
        except spmdzero.SpmdZeroError as error:
            found[kind.__name__] = [type(error).__name__, str(error)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
