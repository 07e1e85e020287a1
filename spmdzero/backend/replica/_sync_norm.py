"""`nn.SyncBatchNorm` in a forward: batch norm with the statistics of all replicas' rows."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from spmdzero.backend.replica._collectives import RowCollectives
from spmdzero.backend.replica._differentiable import summed


def sync_batch_norm(rows: RowCollectives, norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes what `norm`, a SyncBatchNorm in training or not, makes of a replica's `[b, c, ...]`.

    torch's own has kernels for CUDA alone. Statistics are at least fp32, as its are.

    Raises:
        ReplicaRegionError: the backend has no gradients through a collective.
    """
    norm._check_input_dim(x)
    norm._check_non_zero_input_channels(x)
    tracked = norm.training and norm.track_running_stats
    if tracked:
        norm.num_batches_tracked.add_(1)
    factor = norm.momentum or 0.0
    if tracked and norm.momentum is None:
        factor = 1.0 / norm.num_batches_tracked.item()
    stored = not norm.training or norm.track_running_stats
    mean, variance = (norm.running_mean, norm.running_var) if stored else (None, None)
    own_rows = norm.training or norm.running_mean is None
    # In evaluation torch doesn't ask the other ranks either.
    if not norm.training or rows.size == 1:
        return F.batch_norm(x, mean, variance, norm.weight, norm.bias, own_rows, factor, norm.eps)
    return _over_all_rows(rows, norm, x, factor)


def _over_all_rows(
    rows: RowCollectives, norm: nn.SyncBatchNorm, x: torch.Tensor, factor: float
) -> torch.Tensor:
    dims = [0, *range(2, x.dim())]
    shape = (1, -1, *(1,) * (x.dim() - 2))
    count = rows.size * x.numel() // x.shape[1]
    wide = x if x.dtype == torch.float64 else x.float()
    mean = summed(rows, wide.sum(dims)) / count
    centred = wide - mean.reshape(shape)
    variance = summed(rows, centred.square().sum(dims)) / count
    if norm.track_running_stats and norm.running_mean is not None:
        assert norm.running_var is not None
        with torch.no_grad():
            unbiased = variance * (count / max(count - 1, 1))
            norm.running_mean.mul_(1 - factor).add_(mean * factor)
            norm.running_var.mul_(1 - factor).add_(unbiased * factor)
    made = centred * torch.rsqrt(variance + norm.eps).reshape(shape)
    if norm.weight is not None:
        made = made * norm.weight.reshape(shape).float() + norm.bias.reshape(shape).float()
    return made.to(x.dtype)
