"""Names of topologies, and the figures of their chips."""

from pathlib import Path

import pytest

from spmdzero import SpmdZeroUsageError
from spmdzero.explain import CHIPS, Chip, Topology, slices_of
from spmdzero.explain._announced import ANNOUNCED
from spmdzero.explain._slices import hosts_of
from spmdzero.hlo import Matmul

PAGE = Path(__file__).parents[2] / "docs" / "explain.md"
pytestmark = pytest.mark.backends("any")


def test_a_name_says_how_many_devices_there_are() -> None:
    for name, devices, slices, slice_name in (
        ("v5e:2x4", 8, 1, "v5e:2x4"),
        ("v6e:4x4", 16, 1, "v6e:4x4"),
        ("v5p:2x2x2", 8, 1, "v5p:2x2x2"),
        ("2xv5e:2x4", 16, 2, "v5e:2x4"),
        # A chip of it is two devices.
        ("tpu7x:2x2x1", 8, 1, "tpu7x:2x2x1"),
        ("2xtpu7x:2x4", 32, 2, "tpu7x:2x4"),
    ):
        found = Topology.parse(name)
        assert (found.devices, found.slices, found.slice_name) == (devices, slices, slice_name)
        assert found.name == name


def test_a_slice_has_the_name_that_the_cloud_gives_it_too() -> None:
    for name, slice_name, devices, hosts in (
        ("v5litepod-1", "v5e:1x1", 1, 1),
        ("v5litepod-8", "v5e:2x4", 8, 1),
        ("v5litepod-16", "v5e:4x4", 16, 4),
        ("v5e-16", "v5e:4x4", 16, 4),
        ("v6e-256", "v6e:16x16", 256, 64),
        # The number counts cores, of which these chips have two.
        ("v4-8", "v4:2x2x1", 4, 1),
        ("v5p-16", "v5p:2x2x2", 8, 2),
        ("v5p-2048", "v5p:8x8x16", 1024, 256),
        # And a core is a device.
        ("tpu7x-16", "tpu7x:2x2x2", 16, 2),
        ("2xv5litepod-16", "v5e:4x4", 32, 8),
    ):
        found = Topology.parse(name)
        assert (found.slice_name, found.devices, found.hosts) == (slice_name, devices, hosts)
        assert found.name == name
        assert name.endswith(found.cloud_name) or name.startswith("v5e")


def test_a_number_that_the_cloud_has_no_slice_of_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(SpmdZeroUsageError, match=r"slices of v5e are v5litepod-1, v5litepod-4"):
        Topology.parse("v5litepod-12")
    with pytest.raises(SpmdZeroUsageError, match=r"slices of v5p are v5p-8, v5p-16"):
        Topology.parse("v5p-4")


def test_another_name_is_refused_with_an_example() -> None:
    for name in ("v5e", "v5e:8", "v9x:2x4", "v5e:2x", "2v5e:2x4", "", "v7x:2x2x1", "tpu8"):
        with pytest.raises(SpmdZeroUsageError, match=r"such as v5e:2x4"):
            Topology.parse(name)


def test_v5e_has_the_figures_of_its_data_sheet() -> None:
    """197 TFLOPs, 16 GB at 819 GB/s, 1600 Gbit/s: https://cloud.google.com/tpu/docs/v5e."""
    chip = CHIPS["v5e"]
    assert chip.bf16_flops == 197e12
    assert (chip.hbm_bytes, chip.hbm_rate) == (16 * 2**30, 819e9)
    assert chip.ici_rate == 200e9


def test_a_device_of_tpu7x_is_half_a_chip_of_its_data_sheet() -> None:
    """2307 TFLOPs, 192 GiB at 7380 GB/s: https://cloud.google.com/tpu/docs/tpu7x.

    It lists 1200 GB/s over ICI, both ways, as the same table does for v5p, whose own page says
    4800 Gbit/s one way.
    """
    device, v5p = CHIPS["tpu7x"], CHIPS["v5p"]
    assert device.devices == 2
    assert device.bf16_flops == 2307e12 / 2
    assert (device.hbm_bytes, device.hbm_rate) == (96 * 2**30, 7380e9 / 2)
    assert device.ici_rate == v5p.ici_rate / 2 == 300e9


def test_a_generation_that_no_libtpu_compiles_for_is_refused_with_its_figures() -> None:
    for name in ("tpu8t:2x2x1", "8t", "v8t:4x4", "TPU 8t", "tpu8t-16", "2xtpu8t:2x2x1", "TPU8T"):
        said = (
            r"up to 0\.0\.52 .*tpu8t .*unconfirmed.*996 TFLOP/s.* 5,977 in fp8, 231 GB at 6,400 GB"
        )
        with pytest.raises(SpmdZeroUsageError, match=rf"{said}.*tpu7x:2x2x1$"):
            Topology.parse(name)
    for name in ("tpu8i:2x2x1", "8i-8"):
        with pytest.raises(SpmdZeroUsageError, match=r"tpu8i .*1,101 .*8,808 .*309 GB at 8,600"):
            Topology.parse(name)


def test_a_slice_of_eight_chips_is_one_host_or_two() -> None:
    for name, hosts, cloud, machine in (
        ("v6e:2x4", 1, "v6e-8", ""),
        ("v6e:2x4,hosts=1", 1, "v6e-8", ""),
        # Cloud TPU has no such slices, Kubernetes Engine has.
        ("v6e:2x4,hosts=2", 2, "", "ct6e-standard-4t"),
        ("v6e-8,hosts=2", 2, "", "ct6e-standard-4t"),
        ("v5litepod-8,hosts=2", 2, "", "ct5lp-hightpu-4t"),
        ("2xv5e:2x4,hosts=2", 4, "", "ct5lp-hightpu-4t"),
        ("v6e:4x4,hosts=4", 4, "v6e-16", ""),
    ):
        found = Topology.parse(name)
        assert (found.name, found.hosts) == (name, hosts)
        assert (found.cloud_name, found.machine) == (cloud, machine)
        assert found.devices == found.slices * (16 if "4x4" in name else 8)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v6e:2x4,hosts=3", r"v6e:2x4 has 1 or 2 hosts, not 3. Write v6e:2x4 or v6e:2x4,hosts=2$"),
        ("2xv5e-8,hosts=8", r"2xv5e-8 has 1 or 2 hosts, not 8. Write 2xv5e-8 or 2xv5e-8,hosts=2$"),
        ("v6e:4x4,hosts=2", r"v6e:4x4 has 4 hosts, not 2. Write v6e:4x4$"),
        ("v6e:2x2,hosts=2", r"v6e:2x2 has 1 host, not 2. Write v6e:2x2$"),
        ("tpu7x:2x2x2,hosts=1", r"tpu7x:2x2x2 has 2 hosts, not 1. Write tpu7x:2x2x2$"),
        ("v6e:2x4,hosts=two", r"is no TPU topology .* two hosts of four chips v5e:2x4,hosts=2$"),
    ],
)
def test_hosts_that_no_slice_has_are_refused_with_those_that_it_has(name: str, said: str) -> None:
    with pytest.raises(SpmdZeroUsageError, match=said):
        Topology.parse(name)


def test_a_host_of_tpu7x_has_four_chips_whatever_the_shape() -> None:
    for name, hosts in (("tpu7x:2x2x1", 1), ("tpu7x:2x4", 2), ("tpu7x:4x4x4", 16)):
        found = Topology.parse(name)
        assert (found.hosts, found.devices) == (hosts, 8 * hosts)


def peaks(name: str) -> tuple[float | None, ...]:
    """Of a chip, operations per second in bf16, int8 and fp8."""
    chip = CHIPS[name]
    found = (chip.bf16_flops, chip.int8_flops, chip.fp8_flops)
    return tuple(None if peak is None else peak * chip.devices for peak in found)


def test_peaks_of_narrow_numbers_are_those_that_are_published() -> None:
    # https://cloud.google.com/tpu/docs/v4 to v6e and tpu7x; jax/_src/tpu_info.py for fp8 on v6e.
    assert peaks("v4") == (275e12, 275e12, None)
    assert peaks("v5e") == (197e12, 394e12, None)
    assert peaks("v5p") == (459e12, 918e12, None)
    assert peaks("v6e") == (918e12, 1836e12, 918e12)
    assert peaks("tpu7x") == (2307e12, None, 4614e12)


@pytest.mark.parametrize(
    ("chip", "dtypes", "peak"),
    [
        ("v5e", ("s8", "s8"), 394e12),
        # One of them is converted, and both are where the chip has no such peak.
        ("v5e", ("s8", "bf16"), 197e12),
        ("v5e", ("f8e5m2", "f8e5m2"), 197e12),
        ("tpu7x", ("f8e4m3fn", "f8e5m2"), 4614e12 / 2),
        ("tpu7x", ("s8", "s8"), 2307e12 / 2),
        ("v6e", ("f32", "f32"), 918e12),
    ],
)
def test_a_product_is_rated_at_the_peak_of_its_operands(
    chip: str, dtypes: tuple[str, str], peak: float
) -> None:
    product = Matmul(op_name="", macs=1000, dtypes=dtypes)
    assert CHIPS[chip].peak_of([product]) == pytest.approx(peak)


def test_products_of_several_dtypes_have_the_peak_at_which_they_run_one_by_one() -> None:
    narrow = Matmul(op_name="", macs=3 * 10**12, dtypes=("s8", "s8"))
    wide = Matmul(op_name="", macs=10**12, dtypes=("bf16", "bf16"))
    chip = CHIPS["v6e"]
    seconds = 6e12 / 1836e12 + 2e12 / 918e12
    assert chip.peak_of([narrow, wide]) == pytest.approx(8e12 / seconds)
    # Attention's kernels multiply bf16.
    assert chip.peak_of([narrow], in_kernels=2e12) == pytest.approx(8e12 / seconds)
    assert chip.peak_of([wide]) == chip.peak_of([]) == chip.bf16_flops


def test_where_a_chip_is_two_devices_no_torus_is_traced_for() -> None:
    for name in ("tpu7x:2x2x1", "tpu7x:2x2x2", "tpu7x:4x4x4"):
        assert (Topology.parse(name).scatters_whole, Topology.parse(name).torus_to_trace) == (
            True,
            None,
        )
    assert Topology.parse("v5p:2x2x2").torus_to_trace == (2, 2, 2)


def chips_table() -> list[str]:
    """Rows of docs/explain.md: the figures of each chip, also of those to come."""
    rows = [
        f"| {chip.name} | {tera(chip.bf16_flops * chip.devices)} | "
        f"{tera(chip.int8_flops, chip)} | {tera(chip.fp8_flops, chip)} | "
        f"{chip.hbm_bytes * chip.devices / 2**30:.0f} GiB | "
        f"{chip.hbm_rate * chip.devices / 1e9:,.0f} | {chip.ici_rate * chip.devices / 1e9:.0f} | "
        f"{chip.devices} | {chip.libtpu} |"
        for chip in CHIPS.values()
    ]
    coming = [
        f"| {chip.name} | {tera(chip.bf16_flops)} | | {tera(chip.fp8_flops)} | "
        f"{chip.hbm_bytes / 1e9:.0f} GB | {chip.hbm_rate / 1e9:,.0f} | | | none |"
        for chip in ANNOUNCED.values()
    ]
    return [row.replace("|  |", "| |") for row in (*rows, *coming)]


def tera(peak: float | None, chip: Chip | None = None) -> str:
    return "" if peak is None else f"{peak * (chip.devices if chip else 1) / 1e12:,.0f}"


def test_the_page_lists_each_chip_with_its_figures() -> None:
    assert "\n".join(chips_table()) in PAGE.read_text()


def table_of(*chips: str) -> list[str]:
    """Rows of docs/explain.md: each slice of these generations, by its shape."""
    columns = [slices_of(CHIPS[chip]) for chip in chips]
    rows = []
    for same in zip(*columns, strict=True):
        shape = "x".join(map(str, same[0].shape))
        names = " | ".join(f"`{slice_.cloud_name}`, {gigabytes(slice_):,} GiB" for slice_ in same)
        chips_of = same[0].devices // same[0].chip.devices
        hosts = " or ".join(f"{n:,}" for n in hosts_of(same[0].chip.name, same[0].shape))
        rows.append(f"| {shape} | {chips_of:,} | {hosts} | {names} |")
    return rows


def gigabytes(slice_: Topology) -> int:
    return slice_.devices * slice_.chip.hbm_bytes // 2**30


def test_the_page_lists_each_slice_with_its_hosts_and_memory() -> None:
    page = PAGE.read_text()
    for chips in (("v5e", "v6e"), ("v4", "v5p", "tpu7x")):
        assert "\n".join(table_of(*chips)) in page
