"""Buffers that a forward wrote: the mean over replicas for floats, agreement for integers."""

from collections.abc import Callable, Mapping

import torch

from spmdzero.backend._current import programs
from spmdzero.backend._mesh import Mesh
from spmdzero.backend.replica import _manual


def changed_buffers(
    state: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
    versions: Mapping[str, int],
    *,
    wrote: Callable[[torch.Tensor], bool],
) -> dict[str, torch.Tensor]:
    """Those of `before` that a forward replaced in `state` or wrote, as they are now.

    Args:
        versions: of `before`, before the forward.
        wrote: whether an operation wrote one that keeps its version.
    """
    return {
        name: state[name]
        for name, buffer in before.items()
        if state[name] is not buffer or buffer._version != versions[name] or wrote(buffer)
    }


def leave_buffers(
    changed: Mapping[str, torch.Tensor],
    mesh: Mesh,
    flags: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Global values of buffers that are in replica space, one collective for each dtype.

    `flags` takes up, by label, whether replicas differ in an integer buffer.
    """
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, buffer in changed.items():
        by_dtype.setdefault(buffer.dtype, []).append(name)
    result: dict[str, torch.Tensor] = {}
    for dtype, names in by_dtype.items():
        with programs.scope(f"zero.buffer/{names[0] if len(names) == 1 else len(names)}"):
            flat = torch.cat([changed[name].detach().reshape(-1) for name in names])
            stacked = _manual.leave_stacked(
                flat.to(torch.int32) if dtype == torch.bool else flat, mesh
            )
            if dtype.is_floating_point:
                whole = mesh.mark(stacked.mean(0))
            else:
                whole = mesh.mark(stacked.amax(0))
                label = f"a buffer among {names}"
                note_disagreement(flags, label, whole, stacked.amin(0))
        parts = whole.to(dtype).split([changed[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            result[name] = part.reshape(changed[name].shape)
    return result


def note_disagreement(
    flags: dict[str, torch.Tensor], label: str, highest: torch.Tensor, lowest: torch.Tensor
) -> None:
    """Notes, 0-dim int32, whether the highest and the lowest of the replicas' values differ."""
    flags[label] = (highest != lowest).any().to(torch.int32)
