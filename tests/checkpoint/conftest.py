"""A folder in memory for tests of a thousand saves: each fsync on a disk takes milliseconds."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")

_MEMORY = Path("/dev/shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder, in memory where the machine has such a place."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as name:
        yield Path(name)
