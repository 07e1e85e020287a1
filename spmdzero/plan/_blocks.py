"""The scales of a tensor that rests in codes of 8 bits: one for each block of its elements."""

import math
from dataclasses import replace

from spmdzero.plan._layout import Layout
from spmdzero.plan._placement import Placement

BLOCK = 256
"""Elements that share a scale, at most."""

_SUFFIX = "_absmax"


def scale_slot(slot: str) -> str:
    """The slot of the scales of a slot of codes."""
    return f"{slot}{_SUFFIX}"


def coded_slot(slot: str) -> str | None:
    """The slot of codes of which a slot has the scales; None if its name is none of scales."""
    return slot.removesuffix(_SUFFIX) if slot.endswith(_SUFFIX) else None


def layout_of_scales(codes: Layout) -> Layout:
    """Where the scales of codes live, `[*lead, parts, blocks]`: with their blocks.

    `lead` are the codes' first dims. The elements of the other dims are split as the devices split
    them, in `parts`, and a part in blocks of 256; where 256 doesn't divide it, its last block is
    shorter. So no block is on two devices. Where it does, the blocks are those of the elements in
    order, of a tensor on one device.

    Args:
        codes: a layout of any kind but ``partial``.
    """
    stored, spec, local = codes.stored, codes.spec, codes.local
    split = [dim for dim, axes in enumerate(spec) if axes is not None]
    first = split[-1] if split else 0
    if len(stored) - 1 > first and local[-1] % BLOCK == 0:
        # A TPU keeps rows in order, and not the elements of several rows.
        first = len(stored) - 1
    parts = stored[first] // local[first]
    run = math.prod(stored[first:]) // parts
    placement, shape = codes.placement, (*stored[:first], parts, math.ceil(run / BLOCK))
    if placement.kind == "flat":
        reason = "the scales of a flat tensor's blocks"
        placement = Placement(kind="shard", dim=0, over=placement.over, reason=reason)
    return replace(codes, placement=placement, shape=shape)
