"""Placeholders on JAX: inputs of a program that take no memory, sharded as what they stand for."""

import re

import pytest
import torch

from spmdzero.backend import REPLICATED, Mesh, arrays, counters, runtime, tracing_only
from spmdzero.backend.jax import lowering
from spmdzero.errors import ReplicaRegionError
from tests.jax_backend.for_tpus import as_text


def test_placeholders_keep_their_sharding_and_are_donated(mesh: Mesh) -> None:
    with tracing_only(platform="TPU"):
        read, written = (mesh.zeros((16, 8), torch.float32, ("fsdp", None)) for _ in range(2))
        placeholders = lowering.placeholders()
        placeholders.stand_for([read, written])
        assert arrays.sharding_of(read) == "{devices=[8,1]<=[8]}"
        written.add_(read)
        mesh.mark(written, REPLICATED)  # no longer split
        program = placeholders.program([written])
        assert inputs_of(program) == [(("fsdp", None), False)] * 2
        placeholders.stand_for([written])
        written.mul_(2)
        mesh.mark(written, REPLICATED)
        program = placeholders.program([written])
        assert inputs_of(program) == [((None, None), True)]


def inputs_of(program: bytes) -> list[tuple[tuple[str | None, ...], bool]]:
    """For each input of a program the axis that splits each dim, and whether it is donated."""
    (inputs,) = re.findall(r"func\.func public @main\((.*?)\) ->", as_text(program))
    found = []
    for one in re.findall(r"%arg\d+: tensor<.*?> \{(.*?)\}(?=, %arg|$)", inputs):
        (dims,) = re.findall(r"\[(\{.*\})\]", one)
        axes = tuple(axis.strip('"{}') or None for axis in dims.split(", "))
        found.append((axes, "tf.aliasing_output" in one or "jax.buffer_donor" in one))
    return found


def test_nothing_runs_and_nothing_is_read_while_only_tracing(mesh: Mesh) -> None:
    runtime.sync()
    before = counters.compiled()[0]
    # Of a shape that no other test makes, so that it has to be compiled.
    tensor = mesh.zeros((8 * 1013,), torch.float32, ("fsdp",))
    with tracing_only():
        runtime.sync()
        assert counters.compiled()[0] == before
        huge = mesh.zeros((1_000_000, 1_000_000), torch.float32, ("fsdp", None))
        placeholders = lowering.placeholders()
        placeholders.stand_for([huge])
        with pytest.raises(ReplicaRegionError, match="Python reads a value here"):
            huge.cpu()
        assert "tensor without data" in repr(huge * 2)
        assert placeholders.program([huge * 2])
        del huge
    runtime.sync()
    assert counters.compiled()[0] == before + 1
    assert arrays.local_shards(tensor)[0].shape == (1013,)
