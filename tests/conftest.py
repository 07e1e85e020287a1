"""Eight virtual CPU devices for the process: their count is fixed at the first device access."""

import os

os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "8"

import pytest

from spmdzero.plan import MeshSpec
from spmdzero.xla import DeviceMesh, runtime


@pytest.fixture(scope="session")
def mesh() -> DeviceMesh:
    runtime.start()
    return DeviceMesh(MeshSpec((("fsdp", 8),)))
