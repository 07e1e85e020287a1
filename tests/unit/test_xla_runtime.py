"""The runtime: SPMD in time, one torch_xla version, counts, scopes in the compiled program."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from spmdzero.backend.torch_xla import DeviceMesh, optimized_hlo, record_scopes, runtime, scope
from tests.support.processes import environment


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2"),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_spmd_after_the_first_device_access_is_an_error_that_says_what_to_call() -> None:
    result = run_python(
        "import torch, torch_xla\n"
        "from spmdzero.backend.torch_xla import runtime\n"
        "from spmdzero.errors import SpmdZeroRuntimeError\n"
        "torch.ones(2, device=torch_xla.device())\n"
        "try:\n"
        "    runtime.start()\n"
        "except SpmdZeroRuntimeError as error:\n"
        "    print('refused:', error)\n"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("refused: an XLA device was used before SPMD")
    assert "spmdzero.init_distributed()" in result.stdout


def test_another_version_of_torch_xla_is_refused_with_the_one_to_install() -> None:
    result = run_python(
        "import torch_xla\ntorch_xla.__version__ = '2.8.1'\n"
        "import spmdzero.backend.torch_xla._private\n"
    )
    assert result.returncode != 0
    error = result.stderr.strip().splitlines()[-1]
    assert "SpmdZeroRuntimeError: torch_xla 2.8.1 is installed" in error
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in error


def test_a_ledger_after_an_unoptimised_dump_is_an_error_that_names_the_variable() -> None:
    result = run_python(
        "import torch, torch_xla\n"
        "from spmdzero.backend.torch_xla import runtime, optimized_hlo\n"
        "from spmdzero.errors import SpmdZeroRuntimeError\n"
        "from spmdzero.plan import MeshSpec\n"
        "from spmdzero.backend.torch_xla import DeviceMesh\n"
        "runtime.start()\n"
        "mesh = DeviceMesh(MeshSpec((('fsdp', 2),)))\n"
        "x = mesh.mark(torch.ones(4, device=runtime.device()) * 3, ('fsdp',))\n"
        "torch_xla._XLAC._get_xla_tensors_hlo([x])\n"
        "try:\n"
        "    optimized_hlo([x])\n"
        "except SpmdZeroRuntimeError as error:\n"
        "    print('refused:', error)\n"
    )
    assert result.returncode == 0, result.stderr
    assert "XLA_DUMP_POST_OPTIMIZATIONS=1, or record ledgers first" in result.stdout


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

    before = runtime.compile_count()
    compute()
    assert runtime.compile_count() == before + 1
    compute()
    assert runtime.compile_count() == before + 1


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
            total = mesh.mark(mesh.place(torch.ones(8, 47), ("fsdp", None)).sum())
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


@pytest.mark.parametrize("read", ["annotated_program", "optimized_hlo"])
def test_a_program_is_read_while_its_inputs_are_still_being_computed(read: str) -> None:
    result = run_python(
        "import torch\n"
        f"from spmdzero.backend.torch_xla import DeviceMesh, runtime, {read}\n"
        "from spmdzero.plan import MeshSpec\n"
        "runtime.start()\n"
        "mesh = DeviceMesh(MeshSpec((('fsdp', 2),)))\n"
        "x, w = (mesh.place(torch.randn(1024, 1024), spec) for spec in (('fsdp', None), None))\n"
        "runtime.sync()\n"
        "for _ in range(8):\n"
        "    x = torch.tanh(x @ w)\n"
        "mesh.mark(x, ('fsdp', None))\n"
        "runtime.sync()\n"
        f"print('read', len({read}([x * 2])) > 0)\n"
    )
    assert (result.returncode, result.stdout) == (0, "read True\n"), result.stderr
