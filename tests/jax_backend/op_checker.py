"""A dispatch mode that computes each aten op a second time, by JAX, and compares the two."""

import collections

import torch
from torch._decomp import core_aten_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from spmdzero.backend.jax.ops import UnsupportedError, lowering
from tests.jax_backend.op_arrays import TOLERANCE, by_jax, difference, to_torch
from tests.jax_backend.op_claims import CLAIMS, REFERENCES

DECOMPOSITIONS = core_aten_decompositions()
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
        single = isinstance(theirs, torch.Tensor)
        theirs, ours = ([theirs], [ours]) if single else (list(theirs), list(ours))
        if len(theirs) != len(ours):
            self.wrong.append(f"{name}: {len(ours)} outputs, torch has {len(theirs)}")
            return
        wrong = self.compared(func, args, kwargs, ours, theirs)
        shown = f"{name}{self.shown(args, kwargs)}"
        self.wrong += [f"{shown} output {i}: {what}" for i, what in wrong if what]

    @classmethod
    def compared(cls, func, args, kwargs, ours, theirs):
        """Pairs of an output's number, or a claim's, and what is wrong with it, or None."""
        name = str(func)
        if name in CLAIMS:
            yield from enumerate(CLAIMS[name](func, args, kwargs, ours, theirs))
            return
        if name in REFERENCES:
            theirs = REFERENCES[name](func, args, kwargs, theirs)
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if their is None:
                continue
            if our is None:
                yield i, "None"
            elif name in INDEXED and i == 1:
                yield i, cls.misplaced(args, kwargs, our, theirs[0], their)
            else:
                yield i, difference(our, their)

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
