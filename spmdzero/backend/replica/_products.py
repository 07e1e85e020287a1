"""The operations that multiply matrices, and torch's rule for their dtypes."""

from collections.abc import Iterable
from typing import Any

import torch

from spmdzero.backend.forms._quantized import SCALED_PRODUCT

_aten = torch.ops.aten
PRODUCTS = {
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.mv.default,
    _aten.dot.default,
    _aten.linear.default,
    _aten.convolution.default,
    _aten.convolution_overrideable.default,
}
ANCHORS = PRODUCTS | {SCALED_PRODUCT}
"""All other operations are cheap beside these: elementwise, or a sum over a row. XLA would compute
them again in a fusion of the backward anyway, unless memory is plenty."""


def mixed_dtypes(func: Any, args: Iterable[Any]) -> str | None:
    """The reason why torch refuses this product because of its dtypes; None if it doesn't.

    torch's kernels refuse mixed dtypes; its meta kernels and XLA's frontends promote, or fail much
    later.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if len(dtypes) < 2:
        return None
    names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
    return (
        f"{func} takes tensors of different dtypes, {names}. Cast the "
        'input: under "bf16" parameters are bfloat16, and inputs stay as they are given'
    )
