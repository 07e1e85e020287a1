"""An environment with torch_tpu, which `import torch` loads by an entry point.

The distribution here has its shape: metadata with the entry point, and a package whose function
says that it was called.
"""

import os
from pathlib import Path

import pytest

from tests.support.processes import run_python

pytestmark = pytest.mark.backends("any")

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
FILES = {
    "torch_tpu/__init__.py": "def _autoload():\n    print('torch_tpu is loaded')\n",
    "torch_tpu-0.2.0.dist-info/METADATA": "Name: torch_tpu\nVersion: 0.2.0\n",
    "torch_tpu-0.2.0.dist-info/entry_points.txt": (
        "[torch.backends]\ntorch_tpu = torch_tpu:_autoload\n"
    ),
}
LOADED = "torch_tpu is loaded"


@pytest.fixture
def beside(tmp_path: Path) -> dict[str, str]:
    """The variables of a process that has torch_tpu."""
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}


@pytest.mark.slow
def test_torch_alone_loads_it(beside: dict[str, str]) -> None:
    assert LOADED in run_python("-c", "import torch", **beside)


def test_spmdzero_first_keeps_it_out(beside: dict[str, str]) -> None:
    script = "import spmdzero, torch, sys; spmdzero.Engine; print('torch_tpu' in sys.modules)"
    assert run_python("-c", script, **beside).split() == ["False"]


@pytest.mark.slow
def test_who_asks_for_it_gets_it(beside: dict[str, str]) -> None:
    assert LOADED in run_python("-c", "import spmdzero, torch", **{VARIABLE: "1"}, **beside)


def test_without_it_no_variable_is_set() -> None:
    script = f"import spmdzero, os; print(os.environ.get({VARIABLE!r}))"
    assert run_python("-c", script, fresh=True).split() == ["None"]


REFUSED = """
import torch, spmdzero
try:
    spmdzero.initialize(model=torch.nn.Linear(4, 4), config={"train_batch_size": 1})
except spmdzero.SpmdZeroError as error:
    print("refused:", error)
"""


def test_where_both_would_open_a_tpu_the_error_says_what_to_set(beside: dict[str, str]) -> None:
    said = run_python("-c", REFUSED, PJRT_DEVICE="TPU", **beside)
    assert "refused: torch_tpu is loaded" in said
    assert f"{VARIABLE}=0" in said


@pytest.mark.slow
def test_on_a_cpu_it_trains_beside_it(beside: dict[str, str]) -> None:
    said = run_python("-c", REFUSED + "print('made')", **beside)
    assert "refused" not in said
    assert "made" in said


CLIENTS = """
import torch
from spmdzero.errors import SpmdZeroUsageError
import spmdzero.integrations
try:
    spmdzero.integrations.install()
except SpmdZeroUsageError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_clients_that_would_take_it_are_refused(beside: dict[str, str]) -> None:
    said = run_python("-c", CLIENTS, **beside)
    assert "refused: torch_tpu is loaded" in said
    assert "spmdzero run" in said
    assert f"{VARIABLE}=0" in said


def test_run_and_launch_keep_it_out(beside: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch, sys\n"
        f"print('set to', os.environ[{VARIABLE!r}], 'torch_tpu' in sys.modules)\n"
    )
    for words in (["run"], ["launch", "--hosts", "1", "--devices-per-host", "1"]):
        said = run_python("-m", "spmdzero", *words, str(script), **beside, SPMDZERO_BACKEND="jax")
        assert "set to 0 False" in said
        assert LOADED not in said


@pytest.mark.slow
def test_the_doctor_names_it(beside: dict[str, str]) -> None:
    said = run_python("-m", "spmdzero", "doctor", **beside)
    assert "torch_tpu 0.2.0" in said
    assert f"{VARIABLE}=0" in said
    script = "import torch, spmdzero; print(spmdzero.doctor())"
    said = run_python("-c", script, **beside)
    assert "torch_tpu 0.2.0 is loaded" in said
