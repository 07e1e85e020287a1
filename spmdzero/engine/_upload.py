"""Tensors from the host in the form in which the devices hold them, read in parts."""

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from spmdzero.engine._match import Target
from spmdzero.store import Box, whole_box
from spmdzero.xla import local_slices

if TYPE_CHECKING:
    from spmdzero.engine._engine import Engine


def upload(engine: "Engine", target: Target) -> torch.Tensor:
    """What `target` is to hold, on the devices; the host holds no more than their parts of it."""
    held, mesh = target.held, engine.mesh
    if held.placement is None or held.placement.kind == "replicate":
        return mesh.place(target.read(whole_box(held.shape)).to(held.stored.dtype))
    parts: dict[tuple[Box, ...], torch.Tensor] = {}
    for boxes in target.boxes:
        if boxes not in parts:
            parts[boxes] = _part(target, boxes)
    return mesh.upload(
        [parts[boxes] for boxes in target.boxes],
        tuple(held.stored.shape),
        held.spec,
    )


def _part(target: Target, boxes: tuple[Box, ...]) -> torch.Tensor:
    held = target.held
    if held.placement is None or held.placement.kind != "flat":
        (box,) = boxes
        return target.read(box).to(held.stored.dtype)
    (slices, *_) = local_slices(held.stored)
    length = slices[0].stop - slices[0].start
    found = [target.read(box).reshape(-1).to(held.stored.dtype) for box in boxes]
    flat = torch.cat(found) if found else torch.zeros(0, dtype=held.stored.dtype)
    return F.pad(flat, (0, length - math.prod(flat.shape)))
