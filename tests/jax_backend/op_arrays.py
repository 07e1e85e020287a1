"""Tensors of torch as arrays of JAX and back, and how far two of them may be apart."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from spmdzero.backend.jax.ops import jax_dtype

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


def difference(ours, theirs):
    """What is wrong with our array; None if nothing is."""
    if tuple(ours.shape) != tuple(theirs.shape):
        return f"shape {tuple(ours.shape)}, torch has {tuple(theirs.shape)}"
    return apart(to_torch(ours, theirs.dtype), theirs.detach().resolve_conj().resolve_neg())


def apart(ours, theirs):
    """How far a tensor is from one of the same shape; None if it is near enough."""
    dtype = theirs.dtype
    if theirs.numel() == 0:
        return None
    if dtype not in TOLERANCE:
        wrong = int((ours != theirs).sum())
        return f"{wrong} of {ours.numel()} differ" if wrong else None
    rtol, atol = TOLERANCE[dtype]
    exact = torch.complex128 if dtype.is_complex else torch.float64
    ours, theirs = ours.to(exact), theirs.to(exact)
    finite = theirs[theirs.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 1.0
    close = torch.isclose(ours, theirs, rtol, atol * max(1.0, largest), equal_nan=True)
    if bool(close.all()):
        return None
    worst = (ours - theirs).abs().nan_to_num(torch.inf).max().item()
    return f"{int((~close).sum())} of {close.numel()} differ, by up to {worst:.3g}"
