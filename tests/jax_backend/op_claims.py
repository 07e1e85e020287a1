"""What holds of outputs of which torch's own, as its kernel for the CPU makes them, are no measure.

A reference is a better measure than torch's own outputs, compared in their place. A claim tests
what an op's outputs have to fulfil, where more than one is right or torch leaves some undefined.
"""

import torch
from torch.utils._pytree import tree_map

from tests.jax_backend.op_arrays import apart, difference, to_torch

# name -> function of func, args, kwargs and torch's outputs -> those to compare with.
REFERENCES = {}
# name -> function of func, args, kwargs, our outputs and torch's -> iterator of what is wrong.
CLAIMS = {}


def _enters(registry, *names):
    def enter(function):
        for name in names:
            registry[f"aten.{name}" if "." in name else f"aten.{name}.default"] = function
        return function

    return enter


def _as(dtype, args):
    """The same with each tensor of floats in that dtype."""

    def cast(x):
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return tree_map(cast, args)


@_enters(
    REFERENCES,
    *(f"grid_sampler_{dims}{backward}" for dims in ("2d", "3d") for backward in ("", "_backward")),
    "linalg_matrix_exp",
)
def _of_wide_inputs(func, args, kwargs, theirs):
    # Of bfloat16 torch keeps coordinates in 8 bits, and squares a matrix in them again and again.
    out = func(*_as(torch.float32, args), **kwargs)
    return [out] if isinstance(out, torch.Tensor) else list(out)


@_enters(REFERENCES, "_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def _in_float64(func, args, kwargs, theirs):
    # In float32 torch's own kernel is 5e-5 away from this.
    grad, log_probs, targets, inputs, lengths, _, _, *rest = _as(torch.float64, args)
    given = (log_probs, targets, inputs, lengths)
    loss, alpha = getattr(torch.ops.aten._ctc_loss, func._overloadname)(*given, *rest)
    return [func(grad, *given, loss, alpha, *rest).float()]


@_enters(REFERENCES, "_scaled_dot_product_flash_attention_for_cpu_backward")
def _of_its_own_forward(func, args, kwargs, theirs):
    # Torch takes an output that was rounded, of bfloat16 to 8 bits, and is up to 0.04 of the
    # largest gradient away from this (2.9 and 2.14).
    grad, query, key, value, _, _, *rest = _as(torch.float64, args)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = forward(query, key, value, *rest, **_as(torch.float64, kwargs))
    given = (grad, query, key, value, out, logsumexp)
    outs = func(*given, *rest, **_as(torch.float64, kwargs))
    return [out.to(their.dtype) for out, their in zip(outs, theirs, strict=True)]


@_enters(REFERENCES, "linalg_lstsq")
def _with_residuals(func, args, kwargs, theirs):
    # Torch says them of matrices that all have their full rank, and one of its drivers never does.
    a, b = args[:2]
    solution, residuals, *rest = theirs
    if a.shape[-2] > a.shape[-1] and not residuals.numel():
        vector = b.ndim == 1 or b.shape == a.shape[:-1]
        a, b, x = (t.to(torch.promote_types(t.dtype, torch.float64)) for t in (a, b, solution))
        b, x = (t[..., None] if vector else t for t in (b, x))
        residuals = (a @ x - b).abs().square().sum(-2).to(residuals.dtype)
        residuals = residuals[..., 0] if vector else residuals
    return [solution, residuals, *rest]


@_enters(CLAIMS, "polygamma")
def _is_that_in_float64(func, args, kwargs, ours, theirs):
    n, x = args
    exact = func(n, x.double())
    if n == 1:
        # There torch's is large, by what is left of the sine of a whole number of pi.
        exact = exact.where((x > 0) | (x != x.floor()), torch.inf)
    ours = to_torch(ours[0], torch.float32).double()
    # Not of the largest, which is beside a pole. It is off by 2e-6 at most.
    wrong = ~torch.isclose(ours, exact, rtol=1e-5, atol=1e-5, equal_nan=True)
    if wrong.any():
        yield f"of {x[wrong][0]} it is {ours[wrong][0]}, in float64 {exact[wrong][0]}"


@_enters(CLAIMS, "_ctc_loss", "_ctc_loss.Tensor")
def _is_torchs_where_a_target_is(func, args, kwargs, ours, theirs):
    yield difference(ours[0], theirs[0])
    # Behind a sequence's and a target's end torch leaves its memory as it finds it.
    inputs, lengths = (torch.as_tensor(x)[:, None, None] for x in args[2:4])
    theirs = theirs[1]
    alphas = to_torch(ours[1], theirs.dtype)[..., : theirs.shape[2]]
    times, places = torch.arange(theirs.shape[1]), torch.arange(theirs.shape[2])
    meant = (times[:, None] < inputs) & (places <= 2 * lengths)
    yield apart(alphas.where(meant, 0), theirs.where(meant, 0))


@_enters(CLAIMS, "_embedding_bag", "_embedding_bag_forward_only")
def _is_torchs_in_each_mode(func, args, kwargs, ours, theirs):
    yield difference(ours[0], theirs[0])
    weight, indices, offsets, by_frequency, mode, sparse, _, last, padding = (
        *args, *(False, 0, False, None, False, -1)[len(args) - 3 :],
    )  # fmt: skip
    # For sums the CPU's kernel leaves out bags or sizes, which CUDA's has in each mode.
    mean = (weight.double(), indices, offsets, by_frequency, 1, sparse, None, last, padding)
    _, bags, sizes, _ = torch.ops.aten._embedding_bag(*mean)
    yield difference(ours[1], bags)
    # As many as offsets, as CUDA's; the last of them begins no bag if it is the end.
    yield difference(ours[2], torch.nn.functional.pad(sizes, (0, len(offsets) - len(sizes))))
    if mode != 2:
        yield difference(ours[3], theirs[3].new_empty(0))
        return
    # An empty bag has no largest.
    full = (sizes[: len(theirs[0])] > 0)[:, None]
    yield apart(to_torch(ours[3], torch.int64).where(full, 0), theirs[3].where(full, 0))


def _adjoint(a):
    return a.transpose(-1, -2).conj()


def _not_orthonormal(columns):
    one = torch.eye(columns.shape[-1], dtype=columns.dtype).expand(
        *columns.shape[:-2], -1, columns.shape[-1]
    )
    return apart(_adjoint(columns) @ columns, one)


def _vectors(ours, theirs):
    """Of the same shapes, as torch's tensors; an error if they aren't."""
    for our, their in zip(ours, theirs, strict=True):
        assert tuple(our.shape) == tuple(their.shape), (our.shape, their.shape)
    return [to_torch(our, their.dtype) for our, their in zip(ours, theirs, strict=True)]


def _by_nearest(ours, theirs):
    """Our values of each row, in the order of the nearest of torch's, each taken once."""
    ordered = ours.clone()
    if not ours.numel():
        return ordered
    flat = zip(*(x.reshape(-1, x.shape[-1]) for x in (ours, theirs, ordered)), strict=True)
    for our, their, row in flat:
        left = list(range(len(our)))
        for place, value in enumerate(their):
            nearest = min(left, key=lambda i: (our[i] - value).abs().item())
            left.remove(nearest)
            row[place] = our[nearest]
    return ordered


@_enters(CLAIMS, "linalg_eig")
def _are_eigenvectors(func, args, kwargs, ours, theirs):
    values, vectors = _vectors(ours, theirs)
    # Nothing orders them: two builds of LAPACK find them in different orders.
    yield apart(_by_nearest(values, theirs[0]), theirs[0])
    # Any phase is right. The length is 1, and no vector is there twice that torch has once.
    yield apart(args[0].to(vectors.dtype) @ vectors, vectors * values[..., None, :])
    yield apart(vectors.abs().square().sum(-2), torch.ones(values.shape))
    yield apart(*(torch.linalg.svdvals(x) for x in (vectors, theirs[1])))


@_enters(CLAIMS, "_linalg_eigh")
def _are_orthonormal_eigenvectors(func, args, kwargs, ours, theirs):
    yield difference(ours[0], theirs[0])
    values, vectors = _vectors(ours, theirs)
    if not vectors.numel():
        return
    lower = (args[1:] or ("L",))[0].upper() == "L"
    a = args[0] if lower else _adjoint(args[0])
    half = a.tril(-1)
    a = half + _adjoint(half) + torch.diag_embed(a.diagonal(dim1=-2, dim2=-1).real)
    yield apart(a @ vectors, vectors * values[..., None, :])
    yield _not_orthonormal(vectors)


@_enters(CLAIMS, "_linalg_svd")
def _multiply_to_the_matrix(func, args, kwargs, ours, theirs):
    yield difference(ours[1], theirs[1])
    u, s, vh = _vectors(ours, theirs)
    if not u.numel() or not vh.numel():
        return
    k = s.shape[-1]
    yield apart((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], args[0])
    yield _not_orthonormal(u)
    yield _not_orthonormal(_adjoint(vh))


@_enters(CLAIMS, "linalg_qr")
def _are_its_factors(func, args, kwargs, ours, theirs):
    q, r = _vectors(ours, theirs)
    yield apart(r, r.triu())
    if q.numel():
        yield apart(q @ r, args[0])
        yield _not_orthonormal(q)
    elif args[0].numel():
        # The orthogonal factor was not asked for.
        yield apart(_adjoint(r) @ r, _adjoint(args[0]) @ args[0])


def _product_of(lu, pivots):
    """The matrix that was factored, of an LU and its pivots."""
    rows, lower, upper = torch.lu_unpack(lu, pivots)
    return rows @ lower @ upper


# With pivots no element of L is above 1. For complex numbers LAPACK compares |re| + |im|, which is
# up to a root of 2 above their size.
def _without_pivoting(lower):
    most = 2**0.5 if lower.dtype.is_complex else 1.0
    largest = lower.abs().max().item()
    return f"an element of L is {largest}" if largest > most * (1 + 1e-5) else None


def _factors_of_the_same(ours, theirs):
    """What is wrong with an LU and its pivots, which needn't be those that torch chose.

    Which of two elements of nearly one size becomes the pivot differs between builds of LAPACK. So
    the claim is what defines them: both are factors of one matrix, and ours were made by pivoting.
    """
    lu, pivots = _vectors(ours, theirs)
    if not lu.numel():
        return
    size = lu.shape[-2]
    first = torch.arange(1, pivots.shape[-1] + 1)
    if not bool(((pivots >= first) & (pivots <= size)).all()):
        yield f"pivots {pivots} of {size} rows"
        return
    yield apart(_product_of(lu, pivots), _product_of(*theirs))
    yield _without_pivoting(lu.tril(-1))


@_enters(CLAIMS, "_linalg_solve_ex", "_linalg_det", "_linalg_slogdet", "linalg_lu_factor_ex")
def _come_of_any_lu(func, args, kwargs, ours, theirs):
    names = [result.name for result in func._schema.returns]
    at = names.index("LU")
    for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if i not in (at, at + 1):
            yield difference(our, their)
    yield from _factors_of_the_same(ours[at : at + 2], theirs[at : at + 2])


@_enters(CLAIMS, "linalg_lu")
def _are_the_factors(func, args, kwargs, ours, theirs):
    rows, lower, upper = _vectors(ours, theirs)
    if not args[0].numel():
        return
    yield apart(rows @ lower @ upper, args[0])
    yield _not_orthonormal(rows)
    if not bool(((rows == 0) | (rows == 1)).all()):
        yield "no permutation"
    yield apart(upper, upper.triu())
    yield apart(lower, lower.tril(-1) + torch.eye(*lower.shape[-2:], dtype=lower.dtype))
    yield _without_pivoting(lower)
