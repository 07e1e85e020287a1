"""torch's database of ops through lazy tensors, forward and backward, beside the CPU.

test_ops.py compares entries of the table; here what is recorded, written, viewed, taken apart and
refused is told from torch's.
"""

import itertools
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from spmdzero.backend import Mesh, runtime
from spmdzero.errors import ReplicaRegionError, SpmdZeroRuntimeError
from tests.jax_backend.test_ops import op_db

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SAMPLES = 2
# They draw other numbers than the CPU, have memory that nobody wrote, or give any of a few answers.
_LEFT_OUT = (
    "bernoulli", "cauchy", "empty", "exponential", "geometric", "jiterator", "log_normal",
    "multinomial", "new_empty", "normal", "rand", "sparse", "torch.ops", "uniform",
    "linalg.eig", "linalg.svd", "svd", "pca_lowrank", "linalg.qr", "qr", "linalg.householder",
    "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.feature_alpha_dropout",
    "nn.functional.fractional_max_pool", "nn.functional.rrelu",
    "nn.functional.multi_head_attention_forward", "nn.functional.scaled_dot_product_attention",
    # In evaluation torch returns statistics of no elements on the CPU, and all on other devices.
    "native_batch_norm", "_native_batch_norm_legit",
)  # fmt: skip


def _cases() -> Any:
    for op in op_db:
        dtype = next((d for d in (torch.float32, torch.int64) if d in op.dtypes), None)
        if dtype is not None and not op.name.startswith(_LEFT_OUT):
            yield pytest.param(op, dtype, id=op.formatted_name)


def _run(op: Any, sample: Any, device: torch.device | str) -> list[torch.Tensor | None]:
    """What `op` returns, and the gradients of its inputs."""

    def moved(given: Any) -> Any:
        if isinstance(given, torch.device):
            return torch.device(device)
        if not isinstance(given, torch.Tensor):
            return given
        return given.detach().clone().to(device).requires_grad_(given.requires_grad)

    args, kwargs = tree_map(moved, ((sample.input, *sample.args), sample.kwargs))
    kwargs |= {"device": device} if "device" in kwargs else {}
    torch.manual_seed(0)
    made = op(*args, **kwargs)
    outs = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
    leaves = [
        t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    trained = [t for t in outs if t.requires_grad]
    if not leaves or not trained:
        return [*outs]
    grads = [torch.full_like(t, 0.7) for t in trained]
    return [*outs, *torch.autograd.grad(trained, leaves, grads, allow_unused=True)]


def _difference(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> str | None:
    if ours is None or theirs is None:
        return None if ours is theirs else f"{ours} and torch's {theirs}"
    ours, theirs = ours.detach().cpu().resolve_conj(), theirs.detach().resolve_conj().resolve_neg()
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{ours.dtype} {list(ours.shape)}, torch's {theirs.dtype} {list(theirs.shape)}"
    bounds = {"rtol": 0.0, "atol": 0.0}
    if theirs.is_floating_point() or theirs.is_complex():
        finite = theirs.abs()[theirs.abs().isfinite()]
        # Of chains of float32 operations, whose largest value has the error of all.
        largest = float(finite.max()) if finite.numel() else 1.0
        bounds = {"rtol": 2e-3, "atol": 2e-3 * max(largest, 1.0)}
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True, **bounds)
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("op", "dtype"), list(_cases()))
def test_it_is_torchs_through_lazy_tensors_or_refused_in_words(
    mesh: Mesh, op: Any, dtype: torch.dtype
) -> None:
    trained = op.supports_autograd and dtype.is_floating_point
    torch.manual_seed(0)
    # As in test_ops.py: op.sample_inputs looks through the stack for each of them.
    samples = op.sample_inputs_func(op, "cpu", dtype, requires_grad=trained)
    for sample in itertools.islice(samples, SAMPLES):
        try:
            theirs = _run(op, sample, "cpu")
        except (RuntimeError, NotImplementedError):
            continue
        if any(t is not None and t.layout != torch.strided for t in theirs):
            continue
        try:
            ours = _run(op, sample, runtime.device())
        except (SpmdZeroRuntimeError, ReplicaRegionError) as error:
            refused = str(error)
        else:
            refused = None
        if refused is not None:
            # Each refusal names the line.
            assert "test_lazy_ops.py:" in refused
            continue
        assert len(ours) == len(theirs)
        wrong = [_difference(a, b) for a, b in zip(ours, theirs, strict=True)]
        assert not any(wrong), (sample.input, sample.args, sample.kwargs, wrong)
