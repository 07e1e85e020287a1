"""Engines whose meshes differ, which live in one process: teacher and student, two adapters."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.backend import Mesh
from tests.engine.captured import assert_same, batches, make_engine, state

pytestmark = pytest.mark.backends("jax")

MESHES: Mapping[str, dict[str, Any]] = {
    "fsdp": {"fsdp": -1},
    "data": {"fsdp": -1, "data": 2},
}


def engine_of(mesh: str, *, capture: bool) -> spmdzero.Engine:
    return make_engine(capture=capture, spmd={"mesh": MESHES[mesh]})


def losses_of(engines: list[spmdzero.Engine], steps: int) -> list[list[float]]:
    """The losses of each engine; all forwards of a step come before the first read."""
    found = [list[float]() for _ in engines]
    for (x,) in batches(steps):
        # Its random numbers are for each engine what they are when it is alone.
        made = []
        for engine in engines:
            torch.manual_seed(len(found[0]))
            output = engine(x)
            made.append(output[0] if isinstance(output, tuple) else output)
        read = [loss.item() for loss in made]
        for engine, loss, losses, number in zip(engines, made, found, read, strict=True):
            engine.backward(loss)
            engine.step()
            losses.append(number)
    return found


@pytest.mark.parametrize("capture", [False, True])
def test_they_train_beside_each_other_as_each_does_alone(mesh: Mesh, capture: bool) -> None:
    alone = {}
    for name in MESHES:
        engine = engine_of(name, capture=capture)
        (losses,) = losses_of([engine], 3)
        alone[name] = losses, state(engine)
        del engine
    together = [engine_of(name, capture=capture) for name in MESHES]
    for engine, losses, (its, states) in zip(
        together, losses_of(together, 3), alone.values(), strict=True
    ):
        assert losses == its
        assert_same(state(engine), states)
