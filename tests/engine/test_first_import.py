"""What `import spmdzero` and `init_distributed` leave behind in a process: only their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from spmdzero.backend import current
from tests.support.processes import ROOT, environment, run_python

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

# Set by torch_xla for itself while it is imported.
THEIRS = {
    "torch_xla": {
        *("GRPC_VERBOSITY", "PJRT_DYNAMIC_PLUGINS", "PTXLA_TPU_LIBRARY_PATH", "XLA_FLAGS"),
        "TF_CPP_MIN_LOG_LEVEL",
        # The device, which torch_xla asks for at any time.
        "PJRT_DEVICE",
    },
    # Which XLA reads at its first message, at any time.
    "jax": {"TF_CPP_MIN_LOG_LEVEL"},
}[current().name]
# What JAX and torch_xla set for themselves, and may have set for the tests' own process.
MAY_BE_LEFT = {"JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL", "TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY"}
PLACE = {
    # torch_xla's, of `use_spmd`
    **({"XLA_USE_SPMD": "1"} if current().name == "torch_xla" else {}),
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


class First(NamedTuple):
    """A process that imports spmdzero and uses it: what it printed, changed and compiled."""

    printed: list[str]
    errors: str
    found: dict[str, Any]
    options: str


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> First:
    dump = tmp_path_factory.mktemp("dump")
    told = environment(PYTHONPATH=str(ROOT), XLA_FLAGS=f"--xla_dump_to={dump}")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/first_import.py")],
        env={name: value for name, value in told.items() if name not in MAY_BE_LEFT},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    options = "".join(path.read_text() for path in Path(dump).glob("*.debug_options"))
    return First(printed, done.stderr, json.loads(last), options)


def test_importing_and_starting_print_nothing(first: First) -> None:
    # That line is the script's own: gloo's is not there.
    assert first.printed == ["imported"]
    assert first.errors == ""


def test_importing_and_starting_change_no_state_of_the_process(first: First) -> None:
    assert first.found["at import"] == {}
    # torch.distributed names the rank in tracebacks.
    hook, *others = first.found["at the start"].pop("hooks")
    assert "init_process_group" in hook
    assert not any("spmdzero" in other for other in others)
    assert first.found["at the start"] == {}
    assert first.found["sum"] == 4


def test_the_environment_of_child_processes_is_the_backends_not_ours(first: First) -> None:
    assert first.found["variables at import"] == {}
    changed = first.found["variables at the start"]
    # A lone process's place has a test of its own.
    assert changed.keys() - PLACE.keys() <= THEIRS
    # JAX's is inherited where this process has JAX.
    assert current().name == "jax" or changed["PJRT_DEVICE"] == "CPU"
    flags = changed.get("XLA_FLAGS", "")
    assert "xnnpack" not in flags
    assert "min_max" not in flags


def test_a_variable_that_the_user_set_is_inherited_whoever_reads_it() -> None:
    script = (
        "import os, spmdzero; spmdzero.init_distributed()\n"
        "print(*(os.environ.get(name) for name in ('TF_CPP_MIN_LOG_LEVEL', 'JAX_PLATFORMS')))"
    )
    told = {"TF_CPP_MIN_LOG_LEVEL": "1", "JAX_PLATFORMS": "cpu"}
    assert run_python("-c", script, **told).split() == ["1", "cpu"]


def test_a_lone_process_reads_its_place_from_the_environment_as_with_deepspeed(
    first: First,
) -> None:
    assert first.found["variables at the start"].items() >= PLACE.items()


def test_each_module_is_an_attribute_of_its_package_without_an_import(first: First) -> None:
    assert first.found["modules"] > 20
    assert first.found["missing modules"] == []


def test_xla_compiles_as_torch_computes_although_no_variable_says_so(first: First) -> None:
    assert "xla_cpu_use_xnnpack: false" in first.options
    assert "xla_cpu_enable_fast_min_max: false" in first.options


STEPS = """
import sys, torch, spmdzero
from tests.support.engines import Mean, config
engine, *_ = spmdzero.initialize(model=Mean(), config=config())
for _ in range(3):
    engine.train_batch(torch.ones(engine.mesh.size, 4))
print(*sorted({"torch._dynamo", "torch._inductor", "torch.onnx"} & set(sys.modules)))
"""


@pytest.mark.skipif(current().name != "jax", reason="torch_xla captures steps by torch's dynamo")
def test_a_start_imports_no_compiler_of_torchs() -> None:
    assert run_python("-c", STEPS, fresh=True).split() == []
