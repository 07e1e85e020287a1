"""Placeholders: inputs of a program that take no memory, sharded as what they stand for."""

import pytest
import torch

from spmdzero.backend import REPLICATED
from spmdzero.backend.torch_xla import DeviceMesh, Placeholders, counters, local_shards, runtime

pytestmark = pytest.mark.backends("torch_xla")


def test_a_program_of_placeholders_tells_each_inputs_sharding(mesh: DeviceMesh) -> None:
    with runtime.tracing_only():
        whole = mesh.zeros((16, 8), torch.float32, (None, None))
        split = mesh.zeros((16, 8), torch.bfloat16, ("fsdp", None))
        placeholders = Placeholders()
        placeholders.stand_for([whole, split])
        whole.add_(split)
        mesh.mark(whole, REPLICATED)
        program = placeholders.program([whole])
        assert sorted(program.input_shardings.values()) == [
            "{devices=[8,1]0,1,2,3,4,5,6,7}",
            "{replicated}",
        ]
        assert sorted(program.input_shardings) == [0, 1]


def test_what_no_program_wrote_is_as_sharded_in_the_next_one(mesh: DeviceMesh) -> None:
    with runtime.tracing_only():
        read, written = (mesh.zeros((16,), torch.float32, ("fsdp",)) for _ in range(2))
        placeholders = Placeholders()
        placeholders.stand_for([read, written])
        written.add_(read)
        mesh.mark(written, REPLICATED)  # no longer split
        placeholders.program([written])
        placeholders.stand_for([read, written])
        program = placeholders.program([written + read])
        assert sorted(program.input_shardings.values()) == [
            "{devices=[8]0,1,2,3,4,5,6,7}",
            "{replicated}",
        ]


def test_an_input_that_no_output_needs_is_no_input_of_the_program(mesh: DeviceMesh) -> None:
    with runtime.tracing_only():
        used, unused = (mesh.zeros((16,), torch.float32, ("fsdp",)) for _ in range(2))
        placeholders = Placeholders()
        placeholders.stand_for([used, unused])
        assert len(placeholders.program([used * 2]).input_shardings) == 1


def test_nothing_runs_while_only_tracing(mesh: DeviceMesh) -> None:
    runtime.sync()
    before = counters.compiled()[0]
    # Of a shape that no other test makes, so that it has to be compiled.
    tensor = mesh.zeros((8 * 1013,), torch.float32, ("fsdp",))
    with runtime.tracing_only():
        runtime.sync()
        assert runtime.is_tracing_only()
        assert counters.compiled()[0] == before
    assert not runtime.is_tracing_only()
    runtime.sync()
    assert counters.compiled()[0] == before + 1
    runtime.wait()
    assert local_shards(tensor)[0].shape == (1013,)


def test_terabytes_take_no_memory(mesh: DeviceMesh) -> None:
    with runtime.tracing_only():
        tensor = mesh.zeros((1_000_000, 1_000_000), torch.float32, ("fsdp", None))
        placeholders = Placeholders()
        placeholders.stand_for([tensor])
        with pytest.raises(RuntimeError):
            tensor.cpu()
        assert placeholders.program([tensor * 2]).module
