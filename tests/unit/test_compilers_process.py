"""The process that compiles for a TPU: its account of memory, and its end."""

import subprocess
import sys
import types

import psutil
import pytest

pytest.importorskip("jax")

from spmdzero.explain._aot_child import memory_of

pytestmark = pytest.mark.backends("any")


def stats(**sizes: int) -> types.SimpleNamespace:
    names = [
        f"{place}{what}_size_in_bytes"
        for place in ("", "host_")
        for what in ("argument", "output", "alias", "temp")
    ]
    return types.SimpleNamespace(**dict.fromkeys(names, 0) | sizes)


def test_what_rests_on_the_host_is_not_the_devices_peak() -> None:
    # 16 products of 65,536 x 1,024 in a loop on v6e, as libtpu 0.0.50.1 accounts for it, with each
    # turn's input kept on the device, and on the host.
    kept = stats(
        argument_size_in_bytes=167_772_160, output_size_in_bytes=33_554_432,
        temp_size_in_bytes=3_628_268_416, peak_memory_in_bytes=3_156_219_392,
    )  # fmt: skip
    assert memory_of(kept)["peak"] == 3_156_219_392
    offloaded = stats(
        argument_size_in_bytes=167_772_160, output_size_in_bytes=33_554_432,
        temp_size_in_bytes=941_948_160, host_temp_size_in_bytes=2_147_483_648,
        peak_memory_in_bytes=2_348_816_384,
    )  # fmt: skip
    found = memory_of(offloaded)
    assert found["host_peak"] == 2_147_483_648
    assert found["peak"] == 167_772_160 + 33_554_432 + 941_948_160


def test_states_on_the_host_are_taken_off() -> None:
    offloaded = stats(
        argument_size_in_bytes=100, host_argument_size_in_bytes=60, host_output_size_in_bytes=60,
        host_alias_size_in_bytes=60, peak_memory_in_bytes=190, temp_size_in_bytes=30,
    )  # fmt: skip
    assert memory_of(offloaded) == {
        "arguments": 100, "peak": 130, "host_arguments": 60, "host_peak": 60
    }  # fmt: skip


CHILD = """
from spmdzero.explain._aot_child import end_with_parent
end_with_parent()
print("there", flush=True)
__import__("time").sleep(300)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), flush=True)
child.wait()
"""


def test_a_search_that_is_terminated_takes_its_worker_along() -> None:
    worker = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    search = (
        "import os, sys; from spmdzero.cli._plan_job import _interruptible; "
        f"_interruptible([sys.executable, '-c', {worker!r}], dict(os.environ))"
    )
    with subprocess.Popen([sys.executable, "-c", search], stderr=subprocess.PIPE, text=True) as one:
        assert one.stderr is not None
        child = psutil.Process(int(one.stderr.readline()))
        one.terminate()
        assert one.wait(timeout=60) == 143
    child.wait(timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that ends the process")
def test_a_compiler_ends_with_the_process_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        child = psutil.Process(int(one.stdout.readline().split()[0]))
        assert child.is_running()
        one.kill()
    child.wait(timeout=60)
