"""Optimizer states in 8 bits: dynamic codes, with one scale for each block of 256 elements.

Source: 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861, and bitsandbytes 0.50.2
(functional.py, `create_dynamic_map`; backends/cpu/ops.py). A code is the number of an element of a
sorted table of 256 values between -1 and 1, or between 0 and 1 for a mean of squares: 0, 1, and
seven groups of each sign. Group i has `2 ** i` values, without signs twice as many: the middles of
as many equal parts of 0.1 to 1, times `10 ** (i - 6)`. So a value is computed here and not looked
up: a TPU has no quick way to read a table for each element.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdzero.plan import BLOCK

_GROUPS = 7


def is_signed(slot: str) -> bool:
    """Whether a slot's values have signs; a mean of squares has none."""
    return slot != "exp_avg_sq"


def zero_code(slot: str) -> int:
    """The code of 0 in a slot, whatever its block's scale."""
    return 127 if is_signed(slot) else 0


def encoded(stored: Tensor, *, scales: Sequence[int], signed: bool) -> tuple[Tensor, Tensor]:
    """The codes of a tensor, and the scale of each block, which is its largest size.

    Args:
        stored: fp32, `[*lead, *rest]`.
        scales: the shape of the scales, `[*lead, parts, blocks]`: the elements of `rest` in order
            are so many equal parts, of which the last may be shorter, and the blocks of 256
            elements of a part have a scale each; its last one may be shorter.
        signed: see `is_signed`.

    Returns:
        uint8 codes of `stored`'s shape, and fp32 scales `[*scales]`.
    """
    blocks = _in_blocks(stored, scales)
    return _in_codes(blocks, blocks.abs().amax(-1), stored.shape, signed=signed)


def recoded(values: Tensor, *, scales: Sequence[int], signed: bool) -> tuple[Tensor, Tensor]:
    """`encoded` for values that may come from codes, and then become the same codes again.

    The largest of a block is 1 or, where it is negative, -0.99297 of its scale.
    """
    blocks = _in_blocks(values, scales)
    most, least = blocks.amax(-1), blocks.amin(-1)
    largest = most.maximum(-least)
    if signed:
        largest = torch.where(-least >= most, -least / (1 - 0.45 / 64), largest)
    return _in_codes(blocks, largest, values.shape, signed=signed)


def decoded(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The fp32 values of uint8 codes; the arguments are the results of `encoded`."""
    values = values_of_codes(_in_blocks(codes, scales.shape), signed=signed)
    return _out_of_blocks(values * scales.unsqueeze(-1), codes.shape)


def _in_codes(
    blocks: Tensor, scales: Tensor, shape: Sequence[int], *, signed: bool
) -> tuple[Tensor, Tensor]:
    # A block of zeros has no scale, and any code of it means 0.
    size = torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(-1)
    return _out_of_blocks(_codes(blocks / size, signed=signed), shape), scales


def _in_blocks(stored: Tensor, scales: Sequence[int]) -> Tensor:
    """`[*lead, parts, blocks, 256]`; ends of parts, and of the last one, are filled with zeros."""
    *lead, parts, blocks = scales
    split = stored.reshape(*lead, -1)
    run = math.ceil(split.shape[-1] / parts)
    split = _filled(split, parts * run).reshape(*lead, parts, run)
    return _filled(split, blocks * BLOCK).reshape(*lead, parts, blocks, BLOCK)


def _filled(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _out_of_blocks(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    *lead, parts, count, block = blocks.shape
    elements = math.prod(shape[len(lead) :])
    run = math.ceil(elements / parts)
    whole = blocks.reshape(*lead, parts, count * block)[..., :run].reshape(*lead, parts * run)
    return (whole if parts * run == elements else whole[..., :elements]).reshape(shape)


def values_of_codes(codes: Tensor, *, signed: bool) -> Tensor:
    """The table's values: ``10 ** (i - 6) * (0.1 + 0.9 * (place + 0.5) / places)`` in group i.

    The codes of one sign are counted so that group i of n places begins at n.
    """
    # Code 0 is -0.99297, 127 is 0 and 255 is 1; without signs 0 is 0 and 255 is 1.
    count = codes.float() - 127.0 if signed else codes.float() + 1.0
    place = count.abs()
    scale, share = torch.zeros_like(place), torch.ones_like(place)
    for largest, places in _groups(signed=signed):
        here = place >= places
        scale = torch.where(here, torch.full_like(scale, largest), scale)
        share = torch.where(here, torch.full_like(share, 1 / places), share)
    # All but the last two operations are exact.
    value = scale * (0.1 + 0.9 * (place * share - (1 - 0.5 * share)))
    value = torch.where(place >= _end(signed=signed), torch.ones_like(value), value)
    return torch.where(count < 0, -value, value) if signed else value


def _codes(values: Tensor, *, signed: bool) -> Tensor:
    """The codes of the nearest values of the table."""
    size, last = values.abs(), 0.0
    scale = torch.zeros_like(size)
    first = torch.full_like(size, 0.0 if signed else 1.0)
    for largest, places in _groups(signed=signed):
        # From the middle between the last value of the group before and the first one of this.
        here = size > (last + largest * (0.1 + 0.45 / places)) / 2
        scale = torch.where(here, torch.full_like(scale, 1 / largest / 0.9), scale)
        first = torch.where(here, torch.full_like(first, places), first)
        last = largest * (1 - 0.45 / places)
    inside = ((size * scale - 0.1 / 0.9) * first).floor().clamp(min=0.0).minimum(first - 1)
    place = torch.where(scale > 0, first + inside, first)
    # There is no code of -1.
    end = torch.full_like(place, _end(signed=signed))
    place = torch.where(values > (last + 1) / 2, end, place)
    codes = torch.where(values < 0, 127 - place, place + 127) if signed else place - 1
    # Numbers go to eight bits by integers: libtpu casts them in fewer instructions.
    return codes.to(torch.int32).to(torch.uint8)


def _groups(*, signed: bool) -> Iterator[tuple[float, float]]:
    """Yields each group's largest value, and the number of its places."""
    for group in range(_GROUPS):
        yield 10.0 ** (group - _GROUPS + 1), float((1 if signed else 2) << group)


def _end(*, signed: bool) -> float:
    """The place after the last group's, of the code of 1."""
    return float((1 if signed else 2) << _GROUPS)
