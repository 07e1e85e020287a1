"""A dispatch mode that computes each aten op a second time, by JAX, and compares the two."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._decomp import core_aten_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from spmdzero.backend.jax.ops import UnsupportedError, jax_dtype, lowering

DECOMPOSITIONS = core_aten_decompositions()
if hasattr(jax, "enable_x64"):
    x64 = jax.enable_x64
else:
    from jax.experimental import enable_x64 as x64

# Both compute in float32 and round once, but sum in another order and approximate functions by
# other polynomials. A sum's error grows with its terms, not with its result, so what is absolute
# is taken of the largest result. Of bfloat16 another order may turn the last of 8 bits, and
# kernels of torch that keep bfloat16 in between (a few backward ops) the last two.
TOLERANCE = {
    torch.float32: (2e-4, 2e-5),
    torch.complex64: (2e-4, 2e-5),
    torch.float64: (1e-7, 1e-8),
    torch.complex128: (1e-7, 1e-8),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
}

LOOSE = {
    # In float32 torch's own kernel is 4e-5 away from what it computes in float64, this 6e-6: see
    # test_the_gradient_of_ctc_is_nearer_to_torchs_in_float64.
    "aten._ctc_loss_backward.default": (2e-4, 2e-4),
    "aten._ctc_loss_backward.Tensor": (2e-4, 2e-4),
}

# Compared with what torch computes in float64. Its kernels of polygamma lose what cancels between
# the poles: at -8.5 for n = 6 it has 4.0e-3, and -0.2e-3 in float64. In bfloat16 it squares a
# matrix again and again, and keeps coordinates, which have no more than 8 bits then.
BY_DOUBLE = {
    ("aten.polygamma.default", torch.float32),
    ("aten.linalg_matrix_exp.default", torch.bfloat16),
    ("aten.grid_sampler_2d.default", torch.bfloat16),
    ("aten.grid_sampler_2d_backward.default", torch.bfloat16),
    ("aten.grid_sampler_3d.default", torch.bfloat16),
    ("aten.grid_sampler_3d_backward.default", torch.bfloat16),
}

# What JAX has too: not complex32, nor what is quantized.
DTYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    *TOLERANCE,
}

# Memory that nobody has written.
UNDEFINED = {
    f"aten.{name}"
    for name in (
        "empty.memory_format",
        "empty_like.default",
        "empty_strided.default",
        "empty_permuted.default",
        "new_empty.default",
        "new_empty_strided.default",
    )
}
# Where equal elements are, each may be found: the index must only name an equal one.
INDEXED = {
    f"aten.{name}"
    for name in (
        "sort.default",
        "topk.default",
        "kthvalue.default",
        "median.dim",
        "nanmedian.dim",
        "mode.default",
        "max.dim",
        "min.dim",
        "cummax.default",
        "cummin.default",
    )
}
# Of these outputs only some are unique: the vectors turn by a sign.
COMPARED = {
    "aten._linalg_svd.default": (1,),
    "aten._linalg_eigh.default": (0,),
    "aten.linalg_qr.default": (),
    "aten.linalg_eig.default": (0,),
    # The others are for a gradient of the same backend's.
    "aten._embedding_bag.default": (0,),
    "aten._embedding_bag_forward_only.default": (0,),
    "aten._ctc_loss.default": (0,),
    "aten._ctc_loss.Tensor": (0,),
    # LAPACK's drivers say more or less.
    "aten.linalg_lstsq.default": (0,),
}


def to_jax(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    bits = {1: torch.uint8, 2: torch.int16}.get(tensor.dtype.itemsize)
    if bits is None or not tensor.is_floating_point():
        return jnp.asarray(tensor.numpy())
    return jnp.asarray(tensor.view(bits).numpy().view(jax_dtype(tensor.dtype)))


def to_torch(array, dtype):
    array = jnp.asarray(array)
    if jnp.iscomplexobj(array) and not dtype.is_complex:
        array = array.real
    array = np.array(array.astype(jax_dtype(dtype)))
    if dtype.is_floating_point and dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16)).view(dtype)
    return torch.from_numpy(array)


def by_jax(function, args, kwargs):
    """What the lowering computes of torch's tensors, traced as in a program."""
    leaves, spec = tree_flatten((list(args), dict(kwargs)))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def traced(arrays):
        filled = list(leaves)
        for i, array in zip(where, arrays, strict=True):
            filled[i] = array
        a, k = tree_unflatten(filled, spec)
        return function(*a, **k)

    with x64(True):
        return jax.jit(traced)([to_jax(leaves[i]) for i in where])


def difference(ours, theirs, tolerance=None):
    """What is wrong with our array; None if nothing is."""
    if tuple(ours.shape) != tuple(theirs.shape):
        return f"shape {tuple(ours.shape)}, torch has {tuple(theirs.shape)}"
    dtype = theirs.dtype
    ours, theirs = to_torch(ours, dtype), theirs.detach().resolve_conj().resolve_neg()
    if theirs.numel() == 0:
        return None
    if dtype not in TOLERANCE:
        wrong = int((ours != theirs).sum())
        return f"{wrong} of {ours.numel()} differ" if wrong else None
    rtol, atol = tolerance or TOLERANCE[dtype]
    exact = torch.complex128 if dtype.is_complex else torch.float64
    ours, theirs = ours.to(exact), theirs.to(exact)
    finite = theirs[theirs.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 1.0
    close = torch.isclose(ours, theirs, rtol, atol * max(1.0, largest), equal_nan=True)
    if bool(close.all()):
        return None
    worst = (ours - theirs).abs().nan_to_num(torch.inf).max().item()
    return f"{int((~close).sum())} of {close.numel()} differ, by up to {worst:.3g}"


def tolerance_of(name, args):
    """The relative and the absolute one of an op; None for that of the dtype."""
    if name != "aten.polygamma.default" or args[1].dtype != torch.float32:
        return LOOSE.get(name)
    # A power of fp32's last bit beside a pole; the last bit of the terms, which cancel between two.
    return 2e-5, math.factorial(args[0]) * 2 ** (args[0] + 1) * torch.finfo(torch.float32).eps


def by_double(func, args, kwargs, theirs):
    """What torch computes of the same numbers in float64, as the dtypes of `theirs`."""

    def wide(x):
        return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    exact = func(*tree_map(wide, tuple(args)), **tree_map(wide, kwargs))
    return tree_map(lambda x, like: x if like is None else x.to(like.dtype), exact, theirs)


def signature(func, args, kwargs):
    def key(x):
        if isinstance(x, torch.Tensor):
            return (tuple(x.shape), x.dtype)
        return (type(x), str(x))

    leaves, spec = tree_flatten((args, kwargs))
    return (str(func), str(spec), *map(key, leaves))


class Checker(TorchDispatchMode):
    """Compares, and lets torch's own results flow on."""

    def __init__(self, most=None):
        """`most` bounds how many shapes of each op are compared, per combination of dtypes."""
        super().__init__()
        self.most, self.shapes = most, collections.Counter()
        self.exercised, self.missing, self.dynamic = set(), set(), set()
        self.seen, self.wrong = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        twin = self.functional(func)
        if twin is not None:
            self.check(twin, tree_map(self.fresh, args), kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def fresh(x):
        return x.clone() if isinstance(x, torch.Tensor) else x

    @staticmethod
    def functional(func):
        """The op without a side effect; None for what has none of its own."""
        if func.namespace not in ("aten", "prims"):
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if not func._schema.is_mutable:
            return func
        name = func._schema.name.split("::")[1]
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        if not name.endswith("_") or packet is None:
            return None

        # pow_.Scalar's twin is pow.Tensor_Scalar: what they take tells, not the names.
        def takes(f):
            return [(x.name, str(x.type)) for x in f._schema.arguments]

        for overload in (getattr(packet, o) for o in packet.overloads()):
            if takes(overload) == takes(func) and not overload._schema.is_mutable:
                return overload
        return None

    def check(self, func, args, kwargs):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(x.layout != torch.strided or x.dtype not in DTYPES for x in tensors):
            return
        if kwargs.get("dtype", torch.float32) not in (None, *DTYPES):
            return
        key = signature(func, args, kwargs)
        if key in self.seen:
            return
        self.seen.add(key)
        name = str(func)
        dtypes = tuple(x.dtype for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        self.shapes[name, dtypes] += 1
        if self.most is not None and self.shapes[name, dtypes] > self.most:
            return
        function = lowering(func)
        if function is None:
            self.fall_back(func, args, kwargs)
            return
        if name.startswith("aten.as_strided") and not args[0].is_contiguous():
            return
        theirs = func(*args, **kwargs)
        try:
            ours = by_jax(function, args, kwargs)
        except UnsupportedError as error:
            self.dynamic.add(f"{name}: {error}")
            return
        except Exception as error:
            self.wrong.append(f"{name}{self.shown(args, kwargs)}: {type(error).__name__}: {error}")
            return
        self.exercised.add(name)
        if name in UNDEFINED:
            return
        if (name, *dtypes[:1]) in BY_DOUBLE:
            theirs = by_double(func, args, kwargs, theirs)
        single = isinstance(theirs, torch.Tensor)
        theirs, ours = ([theirs], [ours]) if single else (list(theirs), list(ours))
        if len(theirs) != len(ours):
            self.wrong.append(f"{name}: {len(ours)} outputs, torch has {len(theirs)}")
            return
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if their is None or i not in COMPARED.get(name, (i,)):
                continue
            if our is None:
                wrong = "None"
            elif name in INDEXED and i == 1:
                wrong = self.misplaced(args, kwargs, our, theirs[0], their)
            else:
                wrong = difference(our, their, tolerance_of(name, args))
            if wrong:
                self.wrong.append(f"{name}{self.shown(args, kwargs)} output {i}: {wrong}")

    @staticmethod
    def misplaced(args, kwargs, index, values, their):
        index = to_torch(index, torch.int64)
        if tuple(index.shape) != tuple(their.shape):
            return f"indices of shape {tuple(index.shape)}, torch has {tuple(their.shape)}"
        self = args[0]
        if self.ndim == 0 or self.ndim != values.ndim:
            return None
        for d in range(self.ndim):
            fits = all(
                index.shape[e] <= self.shape[e] for e in range(self.ndim) if e != d
            ) and bool((index < self.shape[d]).all())
            if fits:
                found = torch.gather(self, d, index)
                if bool(((found == values) | ((found != found) & (values != values))).all()):
                    return None
        return "the indices name other elements"

    @staticmethod
    def shown(args, kwargs):
        def text(x):
            if isinstance(x, torch.Tensor):
                return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
            return x

        shown = tree_map(text, (tuple(args), kwargs))
        return f"{shown[0]} {shown[1] or ''}"

    def fall_back(self, func, args, kwargs):
        """What the table's user does for an op that the table lacks."""
        try:
            with self:
                if func in DECOMPOSITIONS:
                    out = DECOMPOSITIONS[func](*args, **kwargs)
                else:
                    out = func.decompose(*args, **kwargs)
        except Exception as error:
            self.missing.add(f"{func} ({type(error).__name__})")
            return
        if out is NotImplemented:
            self.missing.add(str(func))
