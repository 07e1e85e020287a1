"""What a TPU chip can hold and do, and the names of groups of chips."""

import re
from dataclasses import dataclass
from math import prod

from spmdzero.backend import Torus, scatters_whole
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain._slices import SHAPES, cloud_name, hosts_of, named_slice

_NAME = re.compile(r"(?P<chip>(?:v|tpu)\d+\w*):(?P<shape>\d+(?:x\d+){1,2})")
_SLICES = re.compile(r"(?:(?P<slices>\d+)x)?(?P<slice>.*)")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What one device of a TPU generation is: a chip by its maker's figures, or its part of one.

    Attributes:
        name: ``v5e``, ``v6e``, ...
        hbm_bytes: memory, bytes.
        bf16_flops: peak bf16 operations per second.
        hbm_rate: bytes per second between memory and device.
        ici_rate: bytes per second that it sends to its neighbours, all links together. Where
            several devices are one chip, its share of the chip's links: what they send each other
            goes over faster ones.
        matrix_units: units that multiply matrices.
        matrix_width: each multiplies by a square of so many weights.
        source: where the figures are published.
        devices: how many of them a chip is.
        libtpu: the oldest version that was seen to compile for it.
        cores: libtpu's name for how cores are devices, "" for what it does on its own.
    """

    name: str
    hbm_bytes: int
    bf16_flops: float
    hbm_rate: float
    ici_rate: float
    matrix_units: int
    matrix_width: int
    source: str
    devices: int
    libtpu: str
    cores: str

    @property
    def clock(self) -> float:
        """Cycles per second: at each, every weight of the matrix units multiplies and adds once."""
        return self.bf16_flops / (2 * self.matrix_units * self.matrix_width**2)


def _chip(
    name: str, *, gib: int, tflops: int, hbm: int, ici_gbit: int, units: int, width: int = 128,
    devices: int = 1, libtpu: str = "0.0.21", cores: str = "",
) -> Chip:  # fmt: skip
    """The figures of one device; those that are given are a chip's, `ici_gbit` one way."""
    return Chip(
        name=name,
        hbm_bytes=gib * 2**30 // devices,
        bf16_flops=tflops * 1e12 / devices,
        hbm_rate=hbm * 1e9 / devices,
        ici_rate=ici_gbit / 8 * 1e9 / devices,
        matrix_units=units // devices,
        matrix_width=width,
        source=f"https://cloud.google.com/tpu/docs/{name}",
        devices=devices,
        libtpu=libtpu,
        cores=cores,
    )


# How much a device of theirs multiplies in a cycle is what libtpu's estimate of a product of two
# bf16 matrices of 8,192 x 8,192 has to fit into. It reckons with 7.4 of v4's 8 units, 3.5 of v5e's
# 4 and 7.2 of v5p's 8, 0.0.21 and 0.0.50 alike.
CHIPS = {
    chip.name: chip
    for chip in (
        # Its two cores are one device for torch_xla and JAX; libtpu on its own makes two of them.
        _chip("v4", gib=32, tflops=275, hbm=1228, ici_gbit=2400, units=8, cores="megacore"),
        _chip("v5e", gib=16, tflops=197, hbm=819, ici_gbit=1600, units=4),
        _chip("v5p", gib=95, tflops=459, hbm=2765, ici_gbit=4800, units=8),
        # Editions of its page say 2 or 4 units, jax/_src/tpu_info.py says 2. libtpu 0.0.21 and
        # 0.0.50 reckon with more than 2 can do: with 2.8 for that product.
        _chip("v6e", gib=32, tflops=918, hbm=1640, ici_gbit=3584, units=4, width=256),
        # jax/_src/tpu_info.py says 2 units a core. libtpu 0.0.50 reckons with 3.2, which takes 4:
        # the clock is 2.2 GHz then, and would be 4.4 GHz with 2. Its page says 1,200 GB/s over ICI
        # both ways, as that of v5p does.
        _chip(
            "tpu7x", gib=192, tflops=2307, hbm=7380, ici_gbit=4800, units=8, width=256,
            devices=2, libtpu="0.0.50",
        ),
    )
}  # fmt: skip
# Generations that jax/_src/tpu_info.py names and libtpu 0.0.50 doesn't know.
_NOT_YET = ("tpu8i", "tpu8t")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A group of chips: ``v5e:2x4`` is one slice, ``2xv5e:2x4`` two slices joined by DCN.

    ``v5litepod-8`` and ``v5e-8``, Google Cloud's name and JAX's, are the same as ``v5e:2x4``.
    A chip of ``tpu7x`` is two devices, any other is one: ``tpu7x:2x2x1`` has 8 devices.

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
        slices, one = _SLICES.fullmatch(name).groups()  # type: ignore[union-attr]
        known = named_slice(one)
        found = _NAME.fullmatch(one)
        if known is None and found is not None:
            known = found["chip"], tuple(int(length) for length in found["shape"].split("x"))
        if known is None or known[0] not in CHIPS:
            raise _unknown(name, one)
        return cls(name=name, chip=CHIPS[known[0]], shape=known[1], slices=int(slices or 1))

    @property
    def slice_name(self) -> str:
        """The name of one slice, as libtpu takes it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def scatters_whole(self) -> bool:
        """Whether libtpu scatters over all devices of a slice at once.

        On tpu7x, whose SparseCores do it, 0.0.50 was seen to on every slice that was tried: 2x2x1,
        2x2x2, 2x4x2, 2x2x4, 4x4x2, 4x4x4.
        """
        return self.chip.devices > 1 or scatters_whole(self.shape)

    @property
    def torus_to_trace(self) -> Torus | None:
        """The shape, where a program traced for it differs from others; None where it doesn't."""
        return None if self.slices > 1 or self.scatters_whole else self.shape

    @property
    def devices(self) -> int:
        """Of all chips of all slices."""
        return self.slices * prod(self.shape) * self.chip.devices

    @property
    def hosts(self) -> int:
        """Of all slices; a process runs on each."""
        return self.slices * hosts_of(self.chip.name, self.shape)

    @property
    def cloud_name(self) -> str:
        """One slice by Google Cloud's name, such as ``v5litepod-8``; "" where it has none."""
        known = self.shape in SHAPES.get(self.chip.name, ())
        return cloud_name(self.chip.name, self.shape) if known else ""


def slices_of(chip: Chip) -> list[Topology]:
    """Google Cloud's slices of a generation, the smallest first."""
    return [
        Topology(name=f"{chip.name}:{'x'.join(map(str, shape))}", chip=chip, shape=shape)
        for shape in SHAPES[chip.name]
    ]


def _unknown(name: str, one: str) -> SpmdZeroUsageError:
    generation = one.partition(":")[0].partition("-")[0]
    why = ""
    if generation in _NOT_YET:
        why = f": no libtpu up to 0.0.50 compiles for {generation}"
    chip = CHIPS.get(generation.replace("v5litepod", "v5e"))
    if chip is not None and "-" in one:
        names = ", ".join(t.cloud_name for t in slices_of(chip))
        why = f": Google Cloud's slices of {chip.name} are {names}"
    return SpmdZeroUsageError(
        f"{name!r} is no TPU topology that is known here{why}. Write a generation "
        f"({', '.join(CHIPS)}) and the chips along each direction, such as v5e:2x4, "
        "v5p:2x2x2 or tpu7x:2x2x1, or Google Cloud's name of a slice, such as v5litepod-8; two "
        "slices of it are 2xv5e:2x4"
    )
