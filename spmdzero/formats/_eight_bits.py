"""Optimizer states that are saved in codes of 8 bits and loaded as numbers, and the reverse."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from spmdzero.formats._boxes import Box, box_shape, box_slices, whole_box
from spmdzero.formats._state import StoredTensor, TrainingState
from spmdzero.optim import is_signed, recoded, values_of_codes
from spmdzero.plan import BLOCK, coded_slot, scale_slot


def in_eight_bits(state: TrainingState, wanted: Mapping[str, tuple[int, ...]]) -> TrainingState:
    """A state whose tensors `wanted` are in codes, and all others in fp32.

    What is in codes of the wanted blocks already stays as it is. Of any other form a tensor is put
    together whole, one at a time, as blocks of another mesh have other elements.

    Args:
        state: a saved state, or a running one.
        wanted: name of a state, such as ``exp_avg/wte.weight``, -> shape of its scales.
    """
    tensors, source = dict(state.tensors), dict[str, tuple[str, ...]]()
    for name in state.tensors:
        word, _, own = name.partition("/")
        slot = coded_slot(word)
        coded = f"{slot}/{own}"
        if slot is None or coded not in tensors or tensors[coded].dtype != torch.uint8:
            continue
        if tensors[name].shape == wanted.get(coded):
            continue
        tensors[coded] = _values(tensors[coded], tensors.pop(name), signed=is_signed(slot))
        source[coded] = (coded, name)
    latest = _Latest()
    for name, shape in wanted.items():
        word, _, own = name.partition("/")
        scales = f"{scale_slot(word)}/{own}"
        if name not in tensors or scales in tensors:
            continue
        origin = source.pop(name, (name,))
        codes = _Codes(name=name, whole=tensors[name], scales=shape, latest=latest)
        tensors[name], tensors[scales] = codes.tensor(0), codes.tensor(1)
        source |= {name: origin, scales: origin}
    if not source:
        return state

    def check(parts: Mapping[str, Iterable[Box]]) -> None:
        needed = {name: boxes for name, boxes in parts.items() if name not in source}
        for name in parts:
            needed |= {saved: state.tensors[saved].pieces for saved in source.get(name, ())}
        state.check(needed)

    return replace(state, tensors=tensors, check=check)


def _values(codes: StoredTensor, scales: StoredTensor, *, signed: bool) -> StoredTensor:
    *lead, parts, blocks = scales.shape
    inner = codes.shape[len(lead) :]
    run = math.ceil(math.prod(inner) / parts)

    def read(box: Box) -> torch.Tensor:
        place = torch.zeros((), dtype=torch.long)
        for (start, stop), length in zip(box[len(lead) :], inner, strict=True):
            place = place.unsqueeze(-1) * length + torch.arange(start, stop)
        place = place.reshape(-1)
        part = place // run
        if not place.numel():
            return torch.zeros(box_shape(box), dtype=torch.float32)
        # A device of a running state has the scales of its own part alone.
        first, last = int(part.min()), int(part.max()) + 1
        held = scales.read((*box[: len(lead)], (first, last), (0, blocks))).flatten(-2)
        of_each = held[..., (part - first) * blocks + place % run // BLOCK]
        values = values_of_codes(codes.read(box), signed=signed)
        return (values * of_each.reshape(box_shape(box))).contiguous()

    return replace(codes, dtype=torch.float32, read=read)


class _Latest:
    """Keeps the codes and scales of the latest tensor, whose devices' parts are read in a row."""

    def __init__(self) -> None:
        self.name, self.made = "", tuple[torch.Tensor, ...]()


@dataclass(frozen=True, kw_only=True)
class _Codes:
    """The codes and the scales of a stored tensor of numbers.

    Attributes:
        name, whole: the tensor.
        scales: the shape of the scales.
        latest: what was made last, of any tensor.
    """

    name: str
    whole: StoredTensor
    scales: tuple[int, ...]
    latest: _Latest = field(repr=False)

    def tensor(self, which: int) -> StoredTensor:
        """The codes (0) or the scales (1)."""
        shape = (self.whole.shape, self.scales)[which]
        return StoredTensor(
            shape=shape,
            dtype=(torch.uint8, torch.float32)[which],
            read=lambda box: self._made()[which][box_slices(box)].contiguous(),
            pieces=(whole_box(shape),),
        )

    def _made(self) -> tuple[torch.Tensor, ...]:
        if self.latest.name != self.name:
            signed = is_signed(self.name.partition("/")[0])
            values = self.whole.whole().float()
            self.latest.made = recoded(values, scales=self.scales, signed=signed)
            self.latest.name = self.name
        return self.latest.made
