"""The runtime: SPMD in time, one torch_xla version, counts, scopes in the compiled program."""

import pytest
import torch
from torch import nn

from spmdzero.backend.torch_xla import (
    DeviceMesh,
    counters,
    optimized_hlo,
    record_scopes,
    runtime,
    scope,
)
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("torch_xla")


def test_spmd_after_the_first_device_access_is_an_error_that_says_what_to_call() -> None:
    printed = run_python(
        "-c",
        "import torch, torch_xla, spmdzero\n"
        "torch.ones(2, device=torch_xla.device())\n"
        "config = {'train_batch_size': 8}\n"
        "try:\n    spmdzero.initialize(model=torch.nn.Linear(4, 3), config=config)\n"
        "except spmdzero.SpmdZeroRuntimeError as error:\n    print(error)\n",
        devices=2,
    )
    assert printed.startswith("an XLA device was used before SPMD")
    assert "spmdzero.init_distributed()" in printed


@pytest.mark.slow
def test_another_version_of_torch_xla_is_refused_with_the_one_to_install() -> None:
    printed = run_python(
        "-c",
        "import torch, torch_xla\ntorch_xla.__version__ = '2.8.1'\nimport spmdzero\n"
        "config = {'train_batch_size': 8}\n"
        "try:\n    spmdzero.initialize(model=torch.nn.Linear(4, 3), config=config)\n"
        "except RuntimeError as error:\n    print(type(error).__name__, error)\n",
        devices=2,
        fresh=True,
    )
    assert printed.startswith("SpmdZeroRuntimeError torch_xla 2.8.1 is installed")
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in printed


def test_start_may_be_called_again(mesh: DeviceMesh) -> None:
    runtime.start()
    assert runtime.device_count() == runtime.local_device_count() == 8


def test_one_process_on_cpu(mesh: DeviceMesh) -> None:
    assert (runtime.process_count(), runtime.process_index()) == (1, 0)
    assert runtime.platform() == "CPU"
    assert runtime.device().type == "xla"


def test_a_program_is_counted_when_it_is_compiled_and_not_when_it_is_found(
    mesh: DeviceMesh,
) -> None:
    def compute() -> torch.Tensor:
        result = mesh.place(torch.ones(8, 41), ("fsdp", None)) * 3
        runtime.sync()
        return result

    # What earlier tests of this process left pending would be in the first program alone.
    runtime.sync()
    before = counters.compiled()[0]
    compute()
    assert counters.compiled()[0] == before + 1
    compute()
    assert counters.compiled()[0] == before + 1


def test_an_in_place_update_reuses_the_buffer_of_its_input(mesh: DeviceMesh) -> None:
    state = mesh.place(torch.ones(8, 43), ("fsdp", None))
    runtime.sync()
    state.add_(1)
    runtime.sync()
    assert runtime.aliased_inputs() == 1


@pytest.mark.parametrize(
    ("wishes", "recorded"),
    [
        ({}, False),
        ({"ledger": True}, True),
        # A loop that compiled at each step is watched until it no longer does.
        ({"ledger": True, "watch": False}, True),
        ({"watch": True, "ledger": False}, True),
    ],
)
def test_a_scope_reaches_the_compiled_program_while_somebody_wants_it(
    mesh: DeviceMesh, wishes: dict[str, bool], recorded: bool
) -> None:
    who = {name: nn.Identity() for name in ("ledger", "watch")}
    for name, wish in wishes.items():
        record_scopes(wish, by=who[name])
    try:
        with scope("zero.gradient/layer.weight"):
            total = mesh.mark(mesh.place(torch.ones(8, 47), ("fsdp", None)).sum(), ())
        text = optimized_hlo([total])
    finally:
        for name in who:
            record_scopes(False, by=who[name])
    assert ("zero.gradient/layer.weight" in text) is recorded
    assert " all-reduce(" in text


def test_the_devices_own_generator_is_repeated_by_seed(mesh: DeviceMesh) -> None:
    draws = []
    for value in (3, 4, 3):
        runtime.seed(value)
        draws.append(torch.rand(16, device=runtime.device()).cpu())
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


READING = """
import torch, torch_xla
from spmdzero.backend import current, programs, runtime
from spmdzero.errors import SpmdZeroRuntimeError
from spmdzero.plan import MeshSpec
runtime.start()
mesh = current().mesh(MeshSpec((("fsdp", 2),)))

def computing():
    x, w = (mesh.place(torch.randn(1024, 1024), spec) for spec in (("fsdp", None), None))
    runtime.sync()
    for _ in range(8):
        x = torch.tanh(x @ w)
    mesh.mark(x, ("fsdp", None))
    runtime.sync()
    return mesh.mark(x * 2, ("fsdp", None))

"""


def test_a_program_is_read_while_its_inputs_are_still_being_computed() -> None:
    printed = run_python(
        "-c",
        READING
        + "print('HloModule' in programs.text([computing()]))\n"
        + "print('HloModule' in programs.optimized_hlo([computing()]))\n",
        devices=2,
    )
    assert printed == "True\nTrue\n"


def test_a_ledger_after_an_unoptimised_dump_is_an_error_that_names_the_variable() -> None:
    printed = run_python(
        "-c",
        READING
        + "x = computing()\nruntime.wait()\ntorch_xla._XLAC._get_xla_tensors_hlo([x])\n"
        + "try:\n    programs.optimized_hlo([computing()])\n"
        + "except SpmdZeroRuntimeError as error:\n    print(error)\n",
        devices=2,
    )
    assert "XLA_DUMP_POST_OPTIMIZATIONS=1, or record ledgers first" in printed
