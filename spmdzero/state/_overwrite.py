"""Tensors from the host in the form in which the devices hold them, read in parts."""

import math

import torch
import torch.nn.functional as F

from spmdzero.backend.torch_xla import is_split, local_shapes
from spmdzero.formats import Box
from spmdzero.state._match import Target
from spmdzero.state._training import Training


def overwrite(training: Training, target: Target) -> int:
    """Gives the engine's tensor its new value; the host holds no more than its devices' parts.

    Returns the bytes that are left to the pending program.
    """
    parts: dict[tuple[Box, ...], torch.Tensor] = {}
    for boxes in target.boxes:
        if boxes not in parts:
            parts[boxes] = _part(target, boxes)
    stored = target.held.stored
    training.mesh.overwrite(stored, [parts[boxes] for boxes in target.boxes])
    return 0 if is_split(stored) else stored.nbytes


def _part(target: Target, boxes: tuple[Box, ...]) -> torch.Tensor:
    held = target.held
    if held.placement is None or held.placement.kind != "flat":
        (box,) = boxes
        return target.read(box).to(held.stored.dtype)
    (length,) = local_shapes(held.stored)[0]
    found = [target.read(box).reshape(-1).to(held.stored.dtype) for box in boxes]
    flat = torch.cat(found) if found else torch.zeros(0, dtype=held.stored.dtype)
    return F.pad(flat, (0, length - math.prod(flat.shape)))
