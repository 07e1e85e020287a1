"""Lion, LAMB and Muon on whole tensors, written from their papers."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Params = list[Any]
Step = Callable[[Params, int, float], None]


def lion_step(beta1: float, beta2: float, decay: float) -> Step:
    """Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675, algorithm 2."""
    momenta: list[Tensor] = []

    def step(params: Params, count: int, lr: float) -> None:
        if count == 1:
            momenta[:] = [torch.zeros_like(p) for p in params]
        for p, m in zip(params, momenta, strict=True):
            update = torch.sign(beta1 * m + (1 - beta1) * p.grad)
            p -= lr * (update + decay * p)
            m.copy_(beta2 * m + (1 - beta2) * p.grad)

    return step


def lamb_step(beta1: float, beta2: float, eps: float, decay: float) -> Step:
    """Large Batch Optimization, arXiv 1904.00962, algorithm 2, as DeepSpeed's kernel varies it.

    The correction of the bias scales lr (csrc/lamb/fused_lamb_cuda_kernel.cu); the ratio is kept
    within [0.01, 10].
    """
    moments: list[tuple[Tensor, Tensor]] = []

    def step(params: Params, count: int, lr: float) -> None:
        if count == 1:
            moments[:] = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
        step_size = lr * math.sqrt(1 - beta2**count) / (1 - beta1**count)
        for p, (m, v) in zip(params, moments, strict=True):
            m.copy_(beta1 * m + (1 - beta1) * p.grad)
            v.copy_(beta2 * v + (1 - beta2) * p.grad**2)
            update = m / (v.sqrt() + eps) + decay * p
            ratio = min(max(float(p.norm() / update.norm()), 0.01), 10.0)
            p -= step_size * ratio * update

    return step


def muon_step(
    momentum: float, decay: float, dtype: torch.dtype, heads: Mapping[int, int] | None = None
) -> Step:
    """https://kellerjordan.github.io/posts/muon with Nesterov momentum; AdamW for vectors.

    `heads` maps the index of a parameter to the number of matrices that its rows are, else 1.
    """
    buffers: list[Tensor] = []
    adam: list[torch.optim.Optimizer] = []

    def step(params: Params, count: int, lr: float) -> None:
        if count == 1:
            buffers[:] = [torch.zeros_like(p) for p in params]
            vectors = [p for p in params if p.dim() < 2]
            adam[:] = [torch.optim.AdamW(vectors, betas=(0.9, 0.95), eps=1e-10)]
        adam[0].param_groups[0].update(lr=lr, weight_decay=decay)
        adam[0].step()
        for index, (p, buffer) in enumerate(zip(params, buffers, strict=True)):
            if p.dim() < 2:
                continue
            buffer.copy_(momentum * buffer + (1 - momentum) * p.grad)
            update = momentum * buffer + (1 - momentum) * p.grad
            matrices = update.to(dtype).chunk((heads or {}).get(index, 1))
            scale = max(1.0, matrices[0].shape[0] / p.shape[1]) ** 0.5
            whole = torch.cat([newton_schulz(matrix) for matrix in matrices]).float()
            p.mul_(1 - lr * decay).sub_(lr * scale * whole)

    return step


def newton_schulz(matrix: Tensor) -> Tensor:
    """The quintic iteration of the post, five times."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
