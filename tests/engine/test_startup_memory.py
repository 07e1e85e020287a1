"""How much host memory a start takes, measured in a process of its own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.processes import run_python

pytestmark = [pytest.mark.backends("torch_xla", test_all="jax"), pytest.mark.slow]

MIB = 2**20
LAYERS, WIDTH = 32, 1024
# For tracing and compiling, of which the small model's start has taken most before: 0.5 to 1.5 MiB
# were seen. One more copy of the parameters would be 128.
SLACK = 16 * MIB

# The CPU's devices keep their buffers in host memory too: those are subtracted.
PROGRAM = """
import sys, torch, spmdzero
from torch import nn

layers, width, weights, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}

def build(layers):
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    if device == "xla":
        # Drawing random weights takes room on the devices, which can't be told from the host's.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1)
    return model

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

# Before the first use of a device.
spmdzero.init_distributed()
source = weights or (lambda name: torch.ones(width, width))
spmdzero.initialize(model=build(1), config=config, weights=lambda name: torch.ones(width, width))
model = build(layers)
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")
engine, *_ = spmdzero.initialize(
    model=model, config=config, weights=source if device == "meta" else None
)
spmdzero.backend.runtime.wait()
peak = status("VmHWM")
on_devices = spmdzero.backend.runtime.device_count() * spmdzero.measure(engine).total
print(peak - before - on_devices)
"""


def host_peak(device: str, weights: str = "") -> int:
    """Bytes above what the process had before `initialize` and what the devices hold after it."""
    printed = run_python(
        *("-c", PROGRAM, str(LAYERS), str(WIDTH), weights, device),
        devices=4,
        # So that what is freed goes back to the system, and the peak counts what was alive.
        MALLOC_MMAP_THRESHOLD_="65536",
    )
    return int(printed.splitlines()[-1])


LARGEST = 4 * WIDTH * WIDTH


@pytest.mark.parametrize(
    ("device", "from_a_file"), [("meta", False), ("meta", True), ("cpu", False), ("xla", False)]
)
def test_a_start_needs_the_largest_tensor_on_the_host_and_no_more(
    device: str, from_a_file: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    if from_a_file:
        save_file({f"{i}.weight": torch.ones(WIDTH, WIDTH) for i in range(LAYERS)}, path)
    assert host_peak(device, str(path) if from_a_file else "") <= LARGEST + SLACK
