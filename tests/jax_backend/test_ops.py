"""Each op that the table names, beside torch's own kernel, through torch's database of ops."""

import functools
import importlib.util
import itertools
import math
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
from tests.jax_backend.op_checker import Checker, by_jax, difference, to_jax, to_torch, x64

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
    samples = op.sample_inputs("cpu", dtype, requires_grad=differentiated)
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


F32 = torch.arange(1.0, 13.0).reshape(3, 4) / 5 - 1
I64 = torch.tensor([[5, -3, 2, 7], [-8, 6, 1, 4], [3, 3, -2, 9]])
SHIFTS = torch.tensor([[0, 1, 2, 3]])
PLANES = torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
BOXES = torch.linspace(-1, 1, 48).reshape(1, 3, 2, 2, 4)
CHANNEL = torch.tensor([0.5, -1.0, 2.0])
COMPLEX = torch.complex(F32, F32.flip(0))
PLACES = torch.tensor([[0, 1, 1, 2]])
HEADS = torch.linspace(-2, 2, 2 * 2 * 5 * 4).reshape(2, 2, 5, 4).sin()

# Of what no op of the database dispatches: arguments, by the overload's name.
DIRECT = {
    "__lshift__.Scalar": [(I64, 2)],
    "__lshift__.Tensor": [(I64, SHIFTS)],
    "__rshift__.Scalar": [(I64, 2)],
    "__rshift__.Tensor": [(I64, SHIFTS)],
    "_addmm_activation": [(F32[:, :3], F32, F32.T)],
    "_embedding_bag_forward_only": [
        (F32, torch.tensor([0, 2, 1, 1]), torch.tensor([0, 3]), False, mode) for mode in (0, 1, 2)
    ],
    "_grid_sampler_2d_cpu_fallback": [(PLANES, PLANES[:, :2].movedim(1, 3), 0, 0, False)],
    "_index_put_impl": [(F32, [torch.tensor([0, 0])], F32[1:], True)],
    "_native_batch_norm_legit": [
        (PLANES, CHANNEL, CHANNEL, CHANNEL * 0, CHANNEL**2, train, 0.1, 1e-5)
        for train in (True, False)
    ],
    "_native_batch_norm_legit.no_stats": [(PLANES, CHANNEL, None, True, 0.1, 1e-5)],
    "_native_batch_norm_legit_functional": [
        (PLANES, CHANNEL, CHANNEL, CHANNEL * 0, CHANNEL**2, True, 0.1, 1e-5)
    ],
    "_native_batch_norm_legit_no_training": [
        (PLANES, CHANNEL, CHANNEL, CHANNEL, CHANNEL**2, 0.1, 1e-5)
    ],
    "_neg_view": [(F32,)],
    "_neg_view_copy": [(F32,)],
    "_is_all_true": [(I64 > -9,), (I64 > 0,)],
    "_is_any_true": [(I64 > 9,), (I64 > 0,)],
    "_reshape_alias": [(F32, [4, 3], [3, 1])],
    "_reshape_copy": [(F32, [4, -1])],
    "_scaled_dot_product_flash_attention_for_cpu": [
        (HEADS, HEADS.flip(2), HEADS.flip(3), 0.0, causal) for causal in (True, False)
    ],
    "_upsample_bicubic2d_aa": [(PLANES, [3, 2], False), (PLANES, [7, 3], True)],
    "_upsample_bicubic2d_aa_backward": [(PLANES, [4, 4], [2, 3, 7, 9], False)],
    "_upsample_nearest_exact2d": [(PLANES, [7, 3]), (PLANES, [6, 2], 1.5, 0.5)],
    "_upsample_nearest_exact2d_backward": [(PLANES, [4, 4], [2, 3, 3, 6])],
    "_upsample_nearest_exact3d": [(BOXES, [3, 5, 2])],
    "_upsample_nearest_exact3d_backward": [(BOXES, [2, 2, 4], [1, 3, 3, 1, 5])],
    "all.dims": [(I64 > 0, [0, 1]), (I64 > 0, [1], True)],
    "argsort": [(I64, 1, True)],
    "argsort.stable": [(I64, True, 1, True)],
    "bitwise_and.Scalar": [(I64, 6)],
    "bitwise_and.Scalar_Tensor": [(6, I64)],
    "bitwise_left_shift.Scalar_Tensor": [(3, SHIFTS)],
    "bitwise_left_shift.Tensor_Scalar": [(I64, 3)],
    "bitwise_or.Scalar": [(I64, 6)],
    "bitwise_or.Scalar_Tensor": [(6, I64)],
    "bitwise_right_shift.Scalar_Tensor": [(300, SHIFTS)],
    "bitwise_right_shift.Tensor_Scalar": [(I64, 1)],
    "bitwise_xor.Scalar": [(I64, 6)],
    "bitwise_xor.Scalar_Tensor": [(6, I64)],
    "bucketize.Scalar": [(0.3, F32[0])],
    "clamp_max": [(F32, 0.2)],
    "conj_physical": [(COMPLEX,)],
    "copysign.Scalar": [(F32, -1.0)],
    "detach_copy": [(F32,)],
    "div.Scalar_mode": [(F32, -0.3, mode) for mode in ("floor", "trunc")]
    + [(I64, 3, mode) for mode in ("floor", "trunc")],
    "fill.Tensor": [(F32, torch.tensor(2))],
    "floor_divide.Scalar": [(I64, -2), (F32, 0.3)],
    "fmod.Scalar": [(I64, -4), (F32, 0.3)],
    "imag": [(COMPLEX,)],
    "lift": [(F32,)],
    "linalg_inv_ex": [(torch.tensor([[4.0, 2.0], [2.0, 2.0]]),)],
    "linalg_lu_factor_ex": [
        (torch.tensor([[4.0, x, 1.0], [2.0, 1.0, 3.0], [0.0, 0.0, 1.0]]),) for x in (2.0, 3.0)
    ],
    "lift_fresh_copy": [(F32,)],
    "linear": [(F32, F32, CHANNEL)],
    "real": [(COMPLEX,)],
    "remainder.Scalar_Tensor": [(7, I64), (-1.5, F32)],
    "replication_pad3d": [(BOXES, [1, 2, 0, 1, 3, 0])],
    "replication_pad3d_backward": [(BOXES, BOXES[:, :, :, :, :2], [1, 1, 0, 0, 0, 0])],
    "scatter.reduce": [(F32, 0, PLACES, F32, how) for how in ("add", "multiply")],
    "scatter.value_reduce": [(F32, 0, PLACES, 3.0, how) for how in ("add", "multiply")],
    "searchsorted.Scalar": [(F32[0], 0.1)],
    "select_copy.int": [(F32, 1, -1)],
    "slice_copy.Tensor": [(F32, 1, -3, None, 2)],
    "sort.stable": [(I64, True, 1, True)],
    "special_zeta.other_scalar": [(F32.abs() + 2, 3.0)],
    "special_zeta.self_scalar": [(3.0, F32.abs() + 2)],
    "split_copy.Tensor": [(F32, 3, 1)],
    "squeeze_copy.dim": [(F32[:1], 0)],
    "squeeze_copy.dims": [(F32[:1], [0, 1])],
    "unsafe_split_with_sizes": [(F32, [1, 3], 1)],
    "upsample_nearest2d": [(PLANES, [7, 3]), (PLANES, [6, 2], 1.5, 0.5)],
    "upsample_nearest2d_backward": [(PLANES, [4, 4], [2, 3, 3, 6])],
    "upsample_nearest3d": [(BOXES, [3, 5, 2])],
    "upsample_nearest3d_backward": [(BOXES, [2, 2, 4], [1, 3, 3, 1, 5])],
    "value_selecting_reduction_backward": [(F32[0], 0, PLACES[0], [3, 4], False)],
    "view.dtype": [(F32, torch.int32), (F32, torch.int16)],
    "view_as_complex_copy": [(F32.reshape(3, 2, 2),)],
    "view_as_real_copy": [(COMPLEX,)],
    "xlogy.Scalar_Other": [(F32, 2.0)],
    "xlogy.Scalar_Self": [(2.0, F32.abs())],
}
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
    CHECKER.check(func, args, kwargs)
    wrong, CHECKER.wrong = CHECKER.wrong, []
    assert not wrong, "\n".join(wrong)


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


def test_the_gradient_of_ctc_is_nearer_to_torchs_in_float64():
    torch.manual_seed(0)
    log_probs = torch.randn(50, 16, 20).log_softmax(2)
    targets, lengths = torch.randint(1, 20, (16, 30)), torch.randint(10, 30, (16,)).tolist()
    given = (targets, [50] * 16, lengths)
    gradient = _overload("_ctc_loss_backward")

    def arguments(log_probs):
        loss, alpha = _overload("_ctc_loss")(log_probs, *given, 0, True)
        return torch.ones_like(loss), log_probs, *given, loss, alpha, 0, True

    exact = gradient(*arguments(log_probs.double()))
    mine = by_jax(table()["aten._ctc_loss_backward.default"], arguments(log_probs), {})
    mine, theirs = to_torch(mine, torch.float32), gradient(*arguments(log_probs))
    assert (mine - exact).abs().max() < (theirs - exact).abs().max()


def test_a_matrix_without_a_cholesky_factor_is_said_to_have_none():
    matrices = torch.tensor([[[4.0, 2.0], [2.0, 2.0]], [[4.0, 2.0], [2.0, 0.5]]])
    _, ours = by_jax(table()["aten.linalg_cholesky_ex.default"], (matrices,), {})
    _, theirs = torch.linalg.cholesky_ex(matrices)
    assert torch.equal(to_torch(ours, torch.int32), theirs)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (2, 3, 3)], ids=str)
def test_factors_that_differ_from_torchs_by_signs_make_the_matrix_again(shape):
    matrix = torch.linspace(0, 9, math.prod(shape)).sin().reshape(shape)

    def factors(name, *args):
        made = by_jax(table()[f"aten.{name}.default"], args, {})
        return [
            to_torch(x, torch.complex64 if x.dtype.kind == "c" else torch.float32) for x in made
        ]

    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    for mode in ("reduced", "complete"):
        q, r = factors("linalg_qr", matrix, mode)
        close(q @ r, matrix)
        close(q.mT @ q, torch.eye(q.shape[-1]).expand(*shape[:-2], -1, -1))
        close(r, r.triu())
    u, s, vh = factors("_linalg_svd", matrix, False, True)
    close((u * s[..., None, :]) @ vh, matrix)
    if shape[-1] != shape[-2]:
        return
    values, vectors = factors("linalg_eig", matrix)
    close(matrix.to(vectors.dtype) @ vectors, vectors * values[..., None, :])
    close(torch.linalg.vector_norm(vectors, dim=-2), torch.ones_like(values).real)
    symmetric = matrix + matrix.mT
    values, vectors = factors("_linalg_eigh", symmetric)
    close((vectors * values[..., None, :]) @ vectors.mT, symmetric)


def test_least_squares_say_what_torchs_driver_by_singular_values_says():
    tall = torch.linspace(0, 5, 12).sin().reshape(4, 3) + torch.eye(4, 3)
    right, driver = torch.linspace(0, 3, 8).reshape(4, 2), {"driver": "gelsd"}
    ours = by_jax(table()["aten.linalg_lstsq.default"], (tall, right), driver)
    theirs = torch.linalg.lstsq(tall, right, **driver)
    for our, their in zip(ours, theirs, strict=True):
        assert difference(our, their) is None


def test_polygamma_has_its_poles():
    x = torch.tensor([-2.0, -1.0, -0.0, 0.0])
    for n in (1, 2, 3):
        ours = by_jax(table()["aten.polygamma.default"], (n, x), {})
        # Torch's trigamma is large there, by what is left of the sine of a whole number of pi.
        expected = torch.full((4,), torch.inf) if n == 1 else torch.polygamma(n, x)
        assert torch.equal(to_torch(ours, torch.float32), expected)


def test_polygamma_of_negative_numbers_is_torchs_in_double_precision():
    # JAX's own is wrong below -8: 6.8 at -8.5, where it is 9.8.
    x = torch.tensor([-20.4, -15.9, -8.5, -8.3, -2.5, -0.3])
    for n in (1, 2, 3, 4):
        ours = by_jax(table()["aten.polygamma.default"], (n, x), {})
        # A power of fp32's last bit beside a pole; the last bit of the terms, which cancel at -2.5.
        terms = math.factorial(n) * 2 ** (n + 1) * torch.finfo(torch.float32).eps
        torch.testing.assert_close(
            to_torch(ours, torch.float32).double(), torch.polygamma(n, x.double()),
            rtol=2e-5, atol=terms,
        )  # fmt: skip


def test_every_entry_was_exercised(capsys):
    """Last, since it asks what the tests before it left in CHECKER."""
    entries = table()
    lacking = sorted(set(entries) - CHECKER.exercised - NOT_ON_CPU)
    # A name of another version of torch is none of this one's ops.
    known = [name for name in lacking if _known(name)]
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
