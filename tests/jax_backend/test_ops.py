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
from tests.jax_backend.op_arrays import by_jax, difference, to_jax, to_torch, x64
from tests.jax_backend.op_checker import Checker
from tests.jax_backend.op_samples import DIRECT, F32, HEADS
from tests.support.selected import product_rows

pytestmark = [
    # The samples are torch's: what they warn of is none of ours.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

# Compiling is what the time goes for: 2 shapes of each op are enough to see its rules.
CHECKER = Checker(most=2)
EVERY = Checker()
RAN = set()


def _differentiable(out):
    flat = torch.utils._pytree.tree_leaves(out)
    return [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad]


def _leaves(sample):
    flat = torch.utils._pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad]


def _run(op, dtype, most, checker):
    differentiated = op.supports_autograd and dtype.is_floating_point
    torch.manual_seed(0)
    # Not op.sample_inputs: for each sample it looks through the stack for the TestCase that asks,
    # which took more than half of this file's time.
    samples = op.sample_inputs_func(op, "cpu", dtype, requires_grad=differentiated)
    for sample in itertools.islice(samples, most):
        inputs = _leaves(sample)
        try:
            with checker:
                out = op(sample.input, *sample.args, **sample.kwargs)
                outs = _differentiable(out)
                if outs and inputs:
                    ones = [torch.ones_like(x) * 0.7 for x in outs]
                    torch.autograd.grad(outs, inputs, ones, allow_unused=True)
        except RuntimeError as error:
            # Torch itself refuses sparse tensors here and there, and bfloat16 in a few gradients.
            if "sparse" not in op.name and "not implemented for" not in str(error):
                raise
    wrong, checker.wrong = checker.wrong, []
    assert not wrong, "\n".join(wrong)


def _cases():
    for op in op_db:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            # The jiterator's ops are CUDA's; fits is what the database says of the CPU.
            fits = dtype in op.dtypes and "jiterator" not in op.name
            if fits and (dtype != torch.int64 or torch.float32 not in op.dtypes):
                name = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}"
                yield pytest.param(op, dtype, id=f"{name}-{str(dtype)[6:]}")


CASES = list(_cases())


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_each_aten_op_of_it_computes_what_torch_does(op, dtype):
    RAN.add((op.formatted_name, dtype))
    _run(op, dtype, 2 if dtype != torch.bfloat16 else 1, CHECKER)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_every_sample_of_it_computes_what_torch_does(op, dtype):
    _run(op, dtype, None, EVERY)


# CUDA's, and what only a decomposition leads to.
NOT_ON_CPU = {"aten.bmm.dtype", "aten.mm.dtype"}


def _overload(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _check(func, args, kwargs):
    """Compares; arguments that only go by name may be given by their place."""
    declared = func._schema.arguments
    named = {d.name: x for d, x in zip(declared, args, strict=False) if d.kwarg_only}
    args = tuple(x for d, x in zip(declared, args, strict=False) if not d.kwarg_only)
    kwargs = {**kwargs, **named}
    # One of its own: CHECKER leaves out a third of the same dtypes.
    checker = Checker()
    checker.check(func, args, kwargs)
    CHECKER.exercised |= checker.exercised
    assert not checker.wrong, "\n".join(checker.wrong)


@pytest.mark.parametrize("name", DIRECT)
def test_what_the_database_does_not_reach(name):
    for args in DIRECT[name]:
        _check(_overload(name), args, {})


def test_zeros_that_are_no_memory():
    _check(_overload("_efficientzerotensor"), ([2, 3],), {"dtype": torch.float32})


@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_a_cpu_and_its_gradient(causal):
    q, k, v = HEADS, HEADS.flip(2), HEADS.flip(3)
    forward = _overload("_scaled_dot_product_flash_attention_for_cpu")
    out, logsumexp = forward(q, k, v, 0.0, causal)
    args = (HEADS.cos(), q, k, v, out, logsumexp, 0.0, causal)
    _check(_overload("_scaled_dot_product_flash_attention_for_cpu_backward"), args, {})


def test_products_in_an_output_dtype_of_their_own():
    a = F32.to(torch.bfloat16)
    with x64(True):
        entries = table()
        ours = entries["aten.mm.dtype"](to_jax(a), to_jax(a.T), torch.float32)
        batch = entries["aten.bmm.dtype"](to_jax(a[None]), to_jax(a.T[None]), torch.float32)
    assert difference(ours, a.float() @ a.float().T) is None
    assert difference(batch[0], a.float() @ a.float().T) is None


SEQUENCES = torch.linspace(-3, 3, 6 * 4 * 5).sin().reshape(6, 4, 5).log_softmax(2)
# Repeated labels, an empty target, one as long as its sequence, and one that is longer.
LABELS = torch.tensor([[1, 1, 2], [4, 4, 4], [3, 2, 1], [2, 3, 4]])


TARGETS = {"padded": LABELS, "joined": torch.cat([LABELS[0], LABELS[2], LABELS[3]])}


@pytest.mark.parametrize(
    ("form", "zero_infinity", "blank"),
    product_rows(TARGETS, [False, True], [0, 2], quick={("padded", True, 0), ("joined", False, 2)}),
)
def test_ctc_of_sequences_and_targets_of_any_length(form, zero_infinity, blank):
    labels = TARGETS[form]
    labels = labels if blank == 0 else labels.where(labels != blank, 0)
    given = (labels, [6, 5, 3, 2], [3, 0, 3, 3])
    _check(_overload("_ctc_loss"), (SEQUENCES, *given, blank, zero_infinity), {})
    loss, alpha = _overload("_ctc_loss")(SEQUENCES, *given, blank, zero_infinity)
    args = (loss.cos().nan_to_num(1), SEQUENCES, *given, loss, alpha, blank, zero_infinity)
    _check(_overload("_ctc_loss_backward"), args, {})


@pytest.mark.parametrize("driver", ["gelsd", "gelss"])
@pytest.mark.parametrize("transposed", [False, True])
def test_least_squares_of_a_matrix_without_its_full_rank(driver, transposed):
    a = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 0.0, -1.0], [0.0, 1.0, 2.0]])
    a, b = (a.T, F32) if transposed else (a, F32.T)
    lstsq = _overload("linalg_lstsq")
    theirs = lstsq(a, b, driver=driver)
    assert theirs[2] == 2
    _check(lstsq, (a, b), {"driver": driver})
    # Of the two singular values that are left, the smaller is cut off too.
    _check(lstsq, (a, b, 0.5), {"driver": driver})
    # Torch's default is no measure: it hands LAPACK pivots that nobody wrote, and says 1 at times.
    ours = by_jax(table()["aten.linalg_lstsq.default"], (a, b), {})
    assert difference(ours[0], theirs[0]) is None
    assert ours[2] == 2


def test_a_matrix_without_a_cholesky_factor_is_said_to_have_none():
    matrices = torch.tensor([[[4.0, 2.0], [2.0, 2.0]], [[4.0, 2.0], [2.0, 0.5]]])
    _, ours = by_jax(table()["aten.linalg_cholesky_ex.default"], (matrices,), {})
    _, theirs = torch.linalg.cholesky_ex(matrices)
    assert torch.equal(to_torch(ours, torch.int32), theirs)


def test_polygamma_has_its_poles():
    x = torch.tensor([-2.0, -1.0, -0.0, 0.0])
    for n in (1, 2, 3):
        ours = by_jax(table()["aten.polygamma.default"], (n, x), {})
        # Torch's trigamma is large there, by what is left of the sine of a whole number of pi.
        expected = torch.full((4,), torch.inf) if n == 1 else torch.polygamma(n, x)
        assert torch.equal(to_torch(ours, torch.float32), expected)


@pytest.mark.parametrize("n", range(1, 9))
def test_polygamma_of_negative_numbers_is_torchs_in_double_precision(n):
    # JAX's own is 6.8 at -8.5 for n = 1, where it is 9.8, and 0.6 at -2.5 for n = 8, where -0.6.
    x = [-20.4, -15.9, -8.5, -8.3, -8.001, -7.999, -2.5, -2.500009, -1.01, -0.4924, -0.3, -0.023]
    _check(_overload("polygamma"), (n, torch.tensor(x)), {})


def test_every_entry_was_exercised(capsys):
    """Last, since it asks what the tests before it left in CHECKER."""
    entries = table()
    lacking = sorted(set(entries) - CHECKER.exercised - NOT_ON_CPU)
    # A name of another version of torch is none of this one's ops, and our own have samples of
    # theirs: `test_low_precision.py`.
    known = [name for name in lacking if _known(name) and not name.startswith("spmdzero.")]
    with capsys.disabled():
        print(f"\n{len(entries)} entries, {len(CHECKER.exercised)} of them exercised")
        print("neither in the table nor decomposed:", ", ".join(sorted(CHECKER.missing)))
        print("of no static shape:", ", ".join(sorted(CHECKER.dynamic)))
    if len(RAN) < len(CASES) - 5:
        pytest.skip("only a part of the database ran")
    assert known == []


def _known(name):
    library, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops, library), packet, None)
    return found is not None and overload in found.overloads()
