"""A file of all weights is written with one of them in memory at a time."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spmdzero.formats import StoredTensor, Weights
from spmdzero.formats.export import write_state_dict
from tests.support.processes import environment
from tests.support.trajectory import ROOT

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

COUNT, ELEMENTS = 16, 8 * 2**20
# What reading one and copying it needs, and torch beside it: a quarter of all.
ROOM = COUNT * ELEMENTS


def main(file: Path) -> None:
    """Writes 16 tensors of 32 MiB in a process that may take 128 MiB more than it has."""

    def stored(number: int) -> StoredTensor:
        return StoredTensor(
            shape=(2, ELEMENTS // 2),
            dtype=torch.float32,
            read=lambda box: torch.full((2, ELEMENTS // 2), float(number)),
            pieces=(((0, 2), (0, ELEMENTS // 2)),),
        )

    weights = Weights(
        tensors={str(number): stored(number) for number in range(COUNT)}, tied={"tied": "3"}
    )
    stored(0).whole()
    status = Path("/proc/self/status").read_text()
    taken = int(status.partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (taken + ROOM, taken + ROOM))
    write_state_dict(weights, file)


def test_a_file_of_more_than_a_process_may_take_is_written(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    done = subprocess.run(
        [sys.executable, "-m", "tests.interchange.test_memory", str(file)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = torch.load(file, weights_only=True, mmap=True)
    assert list(found) == [*map(str, range(COUNT)), "tied"]
    assert all((found[str(number)] == number).all() for number in range(COUNT))
    assert found["tied"].data_ptr() == found["3"].data_ptr()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
