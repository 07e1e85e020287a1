"""Orthogonalising a matrix by Newton-Schulz iterations, as Muon does."""

import math

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_RESTART = 2


def gather_dtype(method: str) -> torch.dtype:
    """The dtype in which `orthogonalize` needs its argument, with no loss from a wider one."""
    return torch.bfloat16 if method == "standard" else torch.float32


def orthogonalize(matrix: Tensor, *, method: str) -> Tensor:
    """`[..., rows, columns]` with all singular values moved close to 1, in `gather_dtype`.

    The quintic iteration of https://kellerjordan.github.io/posts/muon, five times, the
    coefficients and rounding as in DeepSpeed (runtime/zero/muon/original_muon.py): "standard" in
    bf16 on the matrix; "gram" on its square Gram matrix, the same polynomial, in fp32, which is
    DeepSpeed's choice where a device does not compute in fp16.
    """
    x = matrix.to(gather_dtype(method))
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    # x.norm() would round its sum to bf16 at every addition on some backends.
    norm = x.float().square().sum(dim=(-2, -1), keepdim=True).sqrt().to(x.dtype)
    x = x / (norm + 1e-7)
    square = x.size(-2) == x.size(-1)
    x = _plain(x) if method == "standard" or square else _gram(x)
    return x.mT if tall else x


def aspect_scale(rows: int, columns: int) -> float:
    """sqrt(rows / columns), 1 for a matrix that is not tall."""
    return math.sqrt(rows / columns) if rows > columns else 1.0


def _plain(x: Tensor) -> Tensor:
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _sum(_A, x, _sum(_B, gram, (_C * gram) @ gram) @ x)
    return x


def _sum(factor: float, x: Tensor, y: Tensor) -> Tensor:
    """``factor * x + y``, rounded to their dtype once, as DeepSpeed's compiled kernel does."""
    return (factor * x.float() + y.float()).to(x.dtype)


def _gram(x: Tensor) -> Tensor:
    """The iteration on ``x @ x.mT``, https://tridao.me/blog/2026/gram-newton-schulz."""
    identity = torch.eye(x.size(-2), dtype=x.dtype, device=x.device)
    gram = x @ x.mT
    factor: Tensor | None = None
    for i in range(_ITERATIONS):
        if i == _RESTART and factor is not None:
            x = factor @ x
            gram, factor = x @ x.mT, None
        z = _B * gram + (_C * gram) @ gram
        factor = z + _A * identity if factor is None else _A * factor + z @ factor
        step = _A * gram + z @ gram
        gram = _A * step + z @ step
    assert factor is not None
    return factor @ x
