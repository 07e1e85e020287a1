"""Figures of TPU chips, and the names of groups of chips."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from spmdzero.backend import Torus, scatters_whole
from spmdzero.errors import SpmdZeroUsageError
from spmdzero.explain._announced import announced
from spmdzero.explain._slices import SHAPES, cloud_name, hosts_of, machine, named_slice
from spmdzero.hlo import Matmul

_NAME = re.compile(r"(?P<chip>(?:v|tpu)\d+\w*):(?P<shape>\d+(?:x\d+){1,2})")
_SLICES = re.compile(r"(?:(?P<slices>\d+)x)?(?P<slice>.*?)(?:,hosts=(?P<hosts>\d+))?")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The figures of one device of a TPU generation: its maker's for a chip, or a part of them.

    Attributes:
        name: ``v5e``, ``v6e``, ...
        hbm_bytes: memory, bytes.
        bf16_flops: peak bf16 operations per second.
        int8_flops, fp8_flops: peak operations per second of products of such numbers; None where
            nothing is published. They are then rated at the peak of bf16.
        hbm_rate: bytes per second between memory and device.
        ici_rate: bytes per second that a device sends to its neighbours, over all links. If several
            devices are one chip, its share of the chip's links: devices of one chip have faster
            links to each other.
        host_rate: bytes per second each way between the device and its host's memory.
        matrix_units: number of units that multiply matrices.
        matrix_width: side of the square of weights by which a unit multiplies.
        source: page on which the figures are published.
        devices: number of devices of a chip.
        libtpu: the oldest version that was seen to compile for the chip.
        cores: libtpu's name for the division of cores into devices, "" for its default.
    """

    name: str
    hbm_bytes: int
    bf16_flops: float
    int8_flops: float | None
    fp8_flops: float | None
    hbm_rate: float
    ici_rate: float
    host_rate: float
    matrix_units: int
    matrix_width: int
    source: str
    devices: int
    libtpu: str
    cores: str

    @property
    def clock(self) -> float:
        """Cycles per second; each weight of the matrix units multiplies and adds once a cycle."""
        return self.bf16_flops / (2 * self.matrix_units * self.matrix_width**2)

    def peak_of(self, products: Iterable[Matmul], *, in_kernels: float = 0.0) -> float:
        """Operations per second of all these products, each at the peak of its operands' dtype.

        Args:
            products: of compiled programs.
            in_kernels: operations of kernels besides, which multiply bf16.
        """
        wide, narrow, seconds = in_kernels, 0.0, 0.0
        for product in products:
            peak = self._narrow_peak(product.dtypes)
            if peak is None:
                wide += 2 * product.macs
            else:
                narrow += 2 * product.macs
                seconds += 2 * product.macs / peak
        if not narrow:
            return self.bf16_flops
        return (wide + narrow) / (wide / self.bf16_flops + seconds)

    def _narrow_peak(self, dtypes: tuple[str, ...]) -> float | None:
        """The peak of a product of such operands, None if they aren't narrower than bf16."""
        if all(dtype in ("s8", "u8") for dtype in dtypes):
            return self.int8_flops
        return self.fp8_flops if all(dtype.startswith("f8") for dtype in dtypes) else None


def _chip(
    name: str, *, gib: int, tflops: int, hbm: int, ici_gbit: int, host: int, units: int,
    int8: int | None = None, fp8: int | None = None, width: int = 128, devices: int = 1,
    libtpu: str = "0.0.21", cores: str = "",
) -> Chip:  # fmt: skip
    """The figures of one device, from a chip's figures; `ici_gbit` counts one direction."""
    return Chip(
        name=name,
        hbm_bytes=gib * 2**30 // devices,
        bf16_flops=tflops * 1e12 / devices,
        int8_flops=None if int8 is None else int8 * 1e12 / devices,
        fp8_flops=None if fp8 is None else fp8 * 1e12 / devices,
        hbm_rate=hbm * 1e9 / devices,
        ici_rate=ici_gbit / 8 * 1e9 / devices,
        host_rate=host * 1e9 / devices,
        matrix_units=units // devices,
        matrix_width=width,
        source=f"https://cloud.google.com/tpu/docs/{name}",
        devices=devices,
        libtpu=libtpu,
        cores=cores,
    )


# No chip's page has the rate of PCIe to its host. https://jax-ml.github.io/scaling-book/tpus/ says:
# 16 GB/s each way of v4, 32 of v6e, and about half of that of v5. Of tpu7x nothing is published: it
# is assumed to have v6e's.
#
# The numbers of matrix units are checked by libtpu's estimate of a product of two bf16 matrices of
# 8,192 x 8,192, which must fit into what a device multiplies in a cycle. libtpu 0.0.21 and 0.0.50
# both use 7.4 of v4's 8 units, 3.5 of v5e's 4 and 7.2 of v5p's 8.
#
# Peaks of int8 and fp8 are those of the chips' pages; v4's says "275 teraflops (bf16 or int8)".
# Only tpu7x's page has fp8. jax/_src/tpu_info.py has bf16's rate for fp8 on v6e, and none on older
# chips, nor one for int8 on tpu7x. libtpu 0.0.52 takes about half of bf16's cycles for a product of
# 8,192 x 8,192 where a peak here is twice bf16's, and hardly fewer where it is the same or missing,
# but for e5m2, which is as quick as int8 on v5e, v5p and v6e. docs/explain.md has the table.
CHIPS = {
    chip.name: chip
    for chip in (
        # The two cores are one device for torch_xla and JAX; libtpu's default makes them two.
        _chip(
            "v4", gib=32, tflops=275, int8=275, hbm=1228, ici_gbit=2400, host=16, units=8,
            cores="megacore",
        ),
        _chip("v5e", gib=16, tflops=197, int8=394, hbm=819, ici_gbit=1600, host=16, units=4),
        _chip("v5p", gib=95, tflops=459, int8=918, hbm=2765, ici_gbit=4800, host=16, units=8),
        # Editions of its page say 2 or 4 units, jax/_src/tpu_info.py says 2. libtpu 0.0.21 and
        # 0.0.50 use 2.8 units for that product, more than 2.
        _chip(
            "v6e", gib=32, tflops=918, int8=1836, fp8=918, hbm=1640, ici_gbit=3584, host=32,
            units=4, width=256,
        ),
        # jax/_src/tpu_info.py says 2 units a core. libtpu 0.0.50 uses 3.2, which needs 4: the clock
        # is 2.2 GHz then, and would be 4.4 GHz with 2. The chip's page says 1,200 GB/s over ICI in
        # both directions together, as v5p's page does.
        _chip(
            "tpu7x", gib=192, tflops=2307, fp8=4614, hbm=7380, ici_gbit=4800, host=32, units=8,
            width=256, devices=2, libtpu="0.0.50",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A group of chips: ``v5e:2x4`` is one slice, ``2xv5e:2x4`` two slices joined by DCN.

    ``v5litepod-8`` and ``v5e-8``, Google Cloud's name and JAX's, are the same as ``v5e:2x4``.
    A chip of ``tpu7x`` is two devices, any other is one: ``tpu7x:2x2x1`` has 8 devices.
    ``v6e:2x4`` is one host of eight chips, ``v6e:2x4,hosts=2`` two hosts of four.

    Attributes:
        name: the name as the user wrote it.
        chip: the figures of each device.
        shape: number of chips along each direction of one slice.
        slices: number of slices.
        hosts_each: number of hosts of each slice; a process runs on each host.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    hosts_each: int
    slices: int = 1

    @classmethod
    def parse(cls, name: str) -> "Topology":
        """The topology with the name `name`.

        Raises:
            SpmdZeroUsageError: the name is malformed, names a generation that no libtpu compiles
                for, or a number of hosts that no such slice has.
        """
        slices, one, hosts = _SLICES.fullmatch(name).groups()  # type: ignore[union-attr]
        known = named_slice(one)
        found = _NAME.fullmatch(one)
        if known is None and found is not None:
            known = found["chip"], tuple(int(length) for length in found["shape"].split("x"))
        if known is None or known[0] not in CHIPS:
            raise _unknown(name, one)
        chip, shape = known
        has = hosts_of(chip, shape)
        hosts_each = int(hosts or has[0])
        if hosts_each not in has:
            raise SpmdZeroUsageError(_no_such_hosts(name, hosts_each, has))
        return cls(
            name=name, chip=CHIPS[chip], shape=shape, hosts_each=hosts_each, slices=int(slices or 1)
        )

    def with_host_rate(self, host_rate: float) -> "Topology":
        """The same with so many bytes per second each way between a device and its host."""
        return replace(self, chip=replace(self.chip, host_rate=host_rate))

    @property
    def slice_name(self) -> str:
        """The name of one slice for libtpu."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def scatters_whole(self) -> bool:
        """Whether libtpu scatters over all devices of a slice at once.

        libtpu 0.0.50 did so on every tried slice of tpu7x, whose SparseCores scatter: 2x2x1, 2x2x2,
        2x4x2, 2x2x4, 4x4x2, 4x4x4.
        """
        return self.chip.devices > 1 or scatters_whole(self.shape)

    @property
    def torus_to_trace(self) -> Torus | None:
        """The shape if a program has to be traced for it, None if any program fits."""
        return None if self.slices > 1 or self.scatters_whole else self.shape

    @property
    def devices(self) -> int:
        """Number of devices of all chips of all slices."""
        return self.slices * prod(self.shape) * self.chip.devices

    @property
    def hosts(self) -> int:
        """Number of hosts of all slices; a process runs on each."""
        return self.slices * self.hosts_each

    @property
    def cloud_name(self) -> str:
        """Google Cloud's name of one slice, such as ``v5litepod-8``; "" if it has none."""
        chip, shape = self.chip.name, self.shape
        known = shape in SHAPES.get(chip, ()) and self.hosts_each == hosts_of(chip, shape)[0]
        return cloud_name(chip, shape) if known else ""

    @property
    def machine(self) -> str:
        """Google Kubernetes Engine's machine of each host, "" if Cloud TPU starts such slices."""
        return machine(self.chip.name, self.shape, hosts=self.hosts_each)


def slices_of(chip: Chip) -> list[Topology]:
    """Google Cloud's slices of a generation, the smallest first."""
    names = (f"{chip.name}:{'x'.join(map(str, shape))}" for shape in SHAPES[chip.name])
    return [Topology.parse(name) for name in names]


def _no_such_hosts(name: str, hosts: int, has: tuple[int, ...]) -> str:
    """Why a slice can't have so many hosts, and which it can have."""
    one = name.partition(",")[0]
    numbers = " or ".join(map(str, has))
    works = " or ".join((one, *(f"{one},hosts={count}" for count in has[1:])))
    return (
        f"{name!r}: a slice of {one} has {numbers} host{'s' * (has[-1] > 1)}, not {hosts}. Write "
        f"{works}"
    )


def _unknown(name: str, one: str) -> SpmdZeroUsageError:
    coming = announced(one)
    if coming is not None:
        return SpmdZeroUsageError(f"{name!r}: {coming.refused}")
    generation = one.partition(":")[0].partition("-")[0]
    why = ""
    chip = CHIPS.get(generation.replace("v5litepod", "v5e"))
    if chip is not None and "-" in one:
        names = ", ".join(t.cloud_name for t in slices_of(chip))
        why = f": Google Cloud's slices of {chip.name} are {names}"
    return SpmdZeroUsageError(
        f"{name!r} is no TPU topology that is known here{why}. Write a generation "
        f"({', '.join(CHIPS)}) and the chips along each direction, such as v5e:2x4, "
        "v5p:2x2x2 or tpu7x:2x2x1, or Google Cloud's name of a slice, such as v5litepod-8; two "
        "slices of it are 2xv5e:2x4, and two hosts of four chips v5e:2x4,hosts=2"
    )
