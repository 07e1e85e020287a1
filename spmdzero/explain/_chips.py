"""What a TPU chip can hold and do, and the names of groups of chips."""

import re
from dataclasses import dataclass
from math import prod

from spmdzero.backend import Torus, scatters_whole
from spmdzero.errors import SpmdZeroUsageError

_NAME = re.compile(r"(?:(?P<slices>\d+)x)?(?P<chip>v\d+\w*):(?P<shape>\d+(?:x\d+){1,2})")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip of a TPU generation, by its maker's figures.

    Attributes:
        name: ``v5e``, ``v6e``, ...
        hbm_bytes: memory, bytes.
        bf16_flops: peak bf16 operations per second.
        hbm_rate: bytes per second between memory and chip.
        ici_rate: bytes per second between this chip and its neighbours, all links together.
        matrix_units: units that multiply matrices.
        matrix_width: each multiplies by a square of so many weights.
        source: where the figures are published.
    """

    name: str
    hbm_bytes: int
    bf16_flops: float
    hbm_rate: float
    ici_rate: float
    matrix_units: int
    matrix_width: int
    source: str

    @property
    def clock(self) -> float:
        """Cycles per second: at each, every weight of the matrix units multiplies and adds once."""
        return self.bf16_flops / (2 * self.matrix_units * self.matrix_width**2)


def _chip(
    name: str, *, gib: int, tflops: int, hbm: int, ici_gbit: int, units: int, width: int = 128
) -> Chip:
    return Chip(
        name=name,
        hbm_bytes=gib * 2**30,
        bf16_flops=tflops * 1e12,
        hbm_rate=hbm * 1e9,
        ici_rate=ici_gbit / 8 * 1e9,
        matrix_units=units,
        matrix_width=width,
        source=f"https://cloud.google.com/tpu/docs/{name}",
    )


CHIPS = {
    chip.name: chip
    for chip in (
        _chip("v4", gib=32, tflops=275, hbm=1228, ici_gbit=2400, units=8),
        _chip("v5e", gib=16, tflops=197, hbm=819, ici_gbit=1600, units=4),
        _chip("v5p", gib=95, tflops=459, hbm=2765, ici_gbit=4800, units=8),
        # Editions of its page say 2 or 4 units. libtpu 0.0.21 reckons with more than 2 can do: 1.4
        # times as much for a product of two matrices of 8,192 x 8,192.
        _chip("v6e", gib=32, tflops=918, hbm=1640, ici_gbit=3584, units=4, width=256),
    )
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A group of chips: ``v5e:2x4`` is one slice, ``2xv5e:2x4`` two slices joined by DCN.

    Attributes:
        name: as written.
        chip: what each device is.
        shape: chips along each direction of one slice.
        slices: how many slices.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @classmethod
    def parse(cls, name: str) -> "Topology":
        """The topology of that name.

        Raises:
            SpmdZeroUsageError: not of the form, or a generation without figures.
        """
        found = _NAME.fullmatch(name)
        chip = CHIPS.get(found["chip"]) if found else None
        if found is None or chip is None:
            raise SpmdZeroUsageError(
                f"{name!r} is no TPU topology that is known here. Write a generation "
                f"({', '.join(CHIPS)}) and the chips along each direction, such as v5e:2x4 or "
                "v5p:2x2x2; two slices of it are 2xv5e:2x4"
            )
        shape = tuple(int(length) for length in found["shape"].split("x"))
        return cls(name=name, chip=chip, shape=shape, slices=int(found["slices"] or 1))

    @property
    def slice_name(self) -> str:
        """The name of one slice, as libtpu takes it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def torus_to_trace(self) -> Torus | None:
        """The shape, where a program traced for it differs from others; None where it doesn't."""
        return None if self.slices > 1 or scatters_whole(self.shape) else self.shape

    @property
    def devices(self) -> int:
        """Chips of all slices; each is one device."""
        return self.slices * prod(self.shape)
