"""Each op that the table names, beside torch's own kernel, through torch's database of ops."""

import importlib.util
import itertools
import sys
import types
import unittest
import warnings

import pytest
import torch

pytest.importorskip("jax")

if importlib.util.find_spec("expecttest") is None:
    # The database's neighbours subclass its TestCase; nothing here calls it.
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

with warnings.catch_warnings():
    # The database imports what warns of its own deprecation.
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

from spmdzero.backend.jax.ops import table
from tests.jax_backend.op_checker import Checker

pytestmark = [
    # The samples are torch's: what they warn of is none of ours.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CHECKER = Checker()
RAN = set()


def _differentiable(out):
    flat = torch.utils._pytree.tree_leaves(out)
    return [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad]


def _leaves(sample):
    flat = torch.utils._pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad]


def _run(op, dtype, most):
    differentiated = op.supports_autograd and dtype in op.backward_dtypes
    torch.manual_seed(0)
    samples = op.sample_inputs("cpu", dtype, requires_grad=differentiated)
    for sample in itertools.islice(samples, most):
        inputs = _leaves(sample)
        try:
            with CHECKER:
                out = op(sample.input, *sample.args, **sample.kwargs)
                outs = _differentiable(out)
                if outs and inputs:
                    ones = [torch.ones_like(x) * 0.7 for x in outs]
                    torch.autograd.grad(outs, inputs, ones, allow_unused=True)
        except (RuntimeError, TypeError, NotImplementedError, ValueError) as error:
            # What torch itself refuses (a sparse sample, a dtype of a backward kernel).
            print(f"{op.name}: {type(error).__name__}: {str(error)[:100]}")
    wrong, CHECKER.wrong = CHECKER.wrong, []
    assert not wrong, "\n".join(wrong)


def _cases():
    for op in op_db:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            fits = dtype in op.dtypes
            if fits and (dtype != torch.int64 or torch.float32 not in op.dtypes):
                name = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}"
                yield pytest.param(op, dtype, id=f"{name}-{str(dtype)[6:]}")


CASES = list(_cases())


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_each_aten_op_of_it_computes_what_torch_does(op, dtype):
    RAN.add((op.formatted_name, dtype))
    _run(op, dtype, 2 if dtype != torch.bfloat16 else 1)
