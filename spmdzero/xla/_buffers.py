"""Buffers that a forward wrote: the mean over replicas for floats, agreement for integers."""

from collections.abc import Callable, Mapping

import torch

from spmdzero.xla import _manual, _private
from spmdzero.xla.mesh import DeviceMesh


def leave_buffers(
    changed: Mapping[str, torch.Tensor],
    mesh: DeviceMesh,
    note_disagreement: Callable[[str, torch.Tensor, torch.Tensor], None],
) -> dict[str, torch.Tensor]:
    """Global values of buffers that are in replica space, one collective for each dtype."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, buffer in changed.items():
        by_dtype.setdefault(buffer.dtype, []).append(name)
    result: dict[str, torch.Tensor] = {}
    for dtype, names in by_dtype.items():
        with _private.scope(f"zero.buffer/{names[0] if len(names) == 1 else len(names)}"):
            flat = torch.cat([changed[name].detach().reshape(-1) for name in names])
            stacked = _manual.leave_stacked(
                flat.to(torch.int32) if dtype == torch.bool else flat, mesh
            )
            if dtype.is_floating_point:
                whole = mesh.mark(stacked.mean(0))
            else:
                whole = mesh.mark(stacked.amax(0))
                note_disagreement(f"a buffer among {names}", whole, stacked.amin(0))
        parts = whole.to(dtype).split([changed[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            result[name] = part.reshape(changed[name].shape)
    return result
