"""Random functions of views, writes, indexing and dtypes, forward and backward, beside torch's."""

import contextlib
import importlib
import os
from typing import Any

import pytest
import torch

from spmdzero.backend import Mesh, current, runtime
from tests.support.fuzzing import FLOATS, OTHERS, Function

pytestmark = pytest.mark.backends("jax", "torch_xla")

ON_JAX = current().name == "jax"
DTYPES = {"forward": (*FLOATS, *OTHERS), "backward": (torch.float64,)}
# One seed of what failed, to run it alone: FUZZED_SEED=123.
ONLY = os.environ.get("FUZZED_SEED")
PART = 50
# Seeds in `make test`; in `make test-all` 2,500 of each kind more.
SAMPLE, ALL = 15, 50


def as_in_a_forward() -> contextlib.AbstractContextManager[Any]:
    """What a forward has around it that tells torch_xla's calls from torch's."""
    if ON_JAX:
        return contextlib.nullcontext()
    return importlib.import_module("spmdzero.backend.torch_xla.kernels").TorchsCalls()


def check(kind: str, seeds: range) -> None:
    functions = []
    with as_in_a_forward():
        for seed in seeds if ONLY is None else [int(ONLY)]:
            made = Function(seed, runtime.device(), dtypes=DTYPES[kind], strided=ON_JAX)
            if kind == "backward":
                made.backward()
            functions.append(made)
    # One program of all of them: compiling is what takes time.
    runtime.sync()
    for function in functions:
        function.check()


@pytest.mark.parametrize("kind", DTYPES)
def test_a_sample_of_random_functions_is_torchs(mesh: Mesh, kind: str) -> None:
    check(kind, range(SAMPLE))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(ALL))
@pytest.mark.parametrize("kind", DTYPES)
def test_random_functions_are_torchs(mesh: Mesh, kind: str, part: int) -> None:
    check(kind, range(1000 + part * PART, 1000 + (part + 1) * PART))
