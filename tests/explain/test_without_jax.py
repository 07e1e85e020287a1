"""torch_xla's backend in an environment that has neither `jax` nor `libtpu`."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.processes import environment
from tests.support.trajectory import ROOT

pytestmark = pytest.mark.backends("torch_xla")

CODE = """
import importlib.util
import torch
import spmdzero

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()

assert importlib.util.find_spec("jax") is None and importlib.util.find_spec("libtpu") is None
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}
model, batch = Net(64, 64), torch.ones(8, 64)
print(len(spmdzero.explain(model, config, batch, stages=()).moves_on("cpu:2").activations))
try:
    spmdzero.explain(model, config, batch, tpu=["v5e:1x2"])
except spmdzero.SpmdZeroUsageError as error:
    print(error)
"""
_EXTRA = re.compile(r"(jax|jaxlib|libtpu)([-_.].*)?$")


@pytest.fixture(scope="module")
def without_jax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all installed packages but those of the extra."""
    folder = tmp_path_factory.mktemp("packages")
    for kind in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for installed in Path(kind).iterdir():
            if not _EXTRA.match(installed.name):
                (folder / installed.name).symlink_to(installed)
    return folder


@pytest.mark.slow
def test_explain_works_on_the_cpu_and_says_what_a_tpu_needs(without_jax: Path) -> None:
    done = subprocess.run(
        # -S: site-packages itself is not searched.
        [sys.executable, "-S", "-c", CODE],
        env=environment(
            PYTHONPATH=os.pathsep.join([str(ROOT), str(without_jax)]), CPU_NUM_DEVICES="2"
        ),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    activations, message = done.stdout.splitlines()
    assert activations == "0"
    assert message == (
        "a program for TPUs that aren't here is traced by JAX's backend, and this is torch_xla's. "
        "Set SPMDZERO_BACKEND=jax, with pip install 'spmdzero[jax]' 'jax[tpu]'; or explain the "
        "program of this process's devices, without a TPU"
    )
