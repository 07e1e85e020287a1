"""Names of topologies, and the figures of their chips."""

import pytest

from spmdzero import SpmdZeroUsageError
from spmdzero.explain import CHIPS, Topology


def test_a_name_says_how_many_chips_there_are() -> None:
    for name, devices, slices, slice_name in (
        ("v5e:2x4", 8, 1, "v5e:2x4"),
        ("v6e:4x4", 16, 1, "v6e:4x4"),
        ("v5p:2x2x2", 8, 1, "v5p:2x2x2"),
        ("2xv5e:2x4", 16, 2, "v5e:2x4"),
    ):
        found = Topology.parse(name)
        assert (found.devices, found.slices, found.slice_name) == (devices, slices, slice_name)
        assert found.name == name


def test_another_name_is_refused_with_an_example() -> None:
    for name in ("v5e", "v5e:8", "v9x:2x4", "v5e:2x", "2v5e:2x4", ""):
        with pytest.raises(SpmdZeroUsageError, match=r"such as v5e:2x4"):
            Topology.parse(name)


def test_v5e_has_the_figures_of_its_data_sheet() -> None:
    """197 TFLOPs, 16 GB at 819 GB/s, 1600 Gbit/s: https://cloud.google.com/tpu/docs/v5e."""
    chip = CHIPS["v5e"]
    assert chip.bf16_flops == 197e12
    assert (chip.hbm_bytes, chip.hbm_rate) == (16 * 2**30, 819e9)
    assert chip.ici_rate == 200e9
