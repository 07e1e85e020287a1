"""Leaves these tests to `make test-stack-NAME`: each needs an environment of its own."""

import os
from pathlib import Path

import pytest

from tests.stacks import material

pytestmark = pytest.mark.backends("jax")
if "SPMDZERO_STACK" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small language model with its tokenizer."""
    return material.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the data sets."""
    return material.write_data(tmp_path_factory.mktemp("data"))
