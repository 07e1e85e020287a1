"""Names of topologies, and the figures of their chips."""

from pathlib import Path

import pytest

from spmdzero import SpmdZeroUsageError
from spmdzero.explain import CHIPS, Topology, slices_of

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


def test_a_generation_that_no_libtpu_compiles_for_is_refused_for_that() -> None:
    for name in ("tpu8i:2x2x1", "tpu8t:2x2x1"):
        with pytest.raises(SpmdZeroUsageError, match=r"0\.0\.50 compiles for tpu8.*tpu7x:2x2x1"):
            Topology.parse(name)


def test_where_a_chip_is_two_devices_no_torus_is_traced_for() -> None:
    for name in ("tpu7x:2x2x1", "tpu7x:2x2x2", "tpu7x:4x4x4"):
        assert (Topology.parse(name).scatters_whole, Topology.parse(name).torus_to_trace) == (
            True,
            None,
        )
    assert Topology.parse("v5p:2x2x2").torus_to_trace == (2, 2, 2)


def table_of(*chips: str) -> list[str]:
    """Rows of docs/explain.md: each slice of these generations, by its shape."""
    columns = [slices_of(CHIPS[chip]) for chip in chips]
    rows = []
    for same in zip(*columns, strict=True):
        shape = "x".join(map(str, same[0].shape))
        names = " | ".join(f"`{slice_.cloud_name}`, {gigabytes(slice_):,} GiB" for slice_ in same)
        chips_of = same[0].devices // same[0].chip.devices
        rows.append(f"| {shape} | {chips_of:,} | {same[0].hosts:,} | {names} |")
    return rows


def gigabytes(slice_: Topology) -> int:
    return slice_.devices * slice_.chip.hbm_bytes // 2**30


def test_the_page_lists_each_slice_with_its_hosts_and_memory() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    for chips in (("v5e", "v6e"), ("v4", "v5p", "tpu7x")):
        assert "\n".join(table_of(*chips)) in page
