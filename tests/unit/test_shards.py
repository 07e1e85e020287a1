"""Which device holds which part of a tensor, as a value, as text and as a drawing."""

import re
from collections.abc import Sequence

import pytest
import torch

import spmdzero
from spmdzero.backend import Mesh, current, runtime
from spmdzero.plan import MeshSpec

pytestmark = pytest.mark.backends("any")


def view(mesh: Mesh, shape: Sequence[int], spec: tuple[str | None, ...]) -> spmdzero.ShardView:
    return spmdzero.shards(mesh.place(torch.zeros(tuple(shape)), spec))


@pytest.fixture(scope="module")
def grid(mesh: Mesh) -> Mesh:
    return current().mesh(MeshSpec((("data", 2), ("fsdp", 4))))


def test_the_parts_are_where_the_devices_values_are(mesh: Mesh) -> None:
    host = torch.arange(16 * 24.0).reshape(16, 24)
    tensor = mesh.place(host, (None, "fsdp"))
    parts = [shard.slices for shard in spmdzero.shards(tensor).shards]
    for part, held in zip(parts, spmdzero.local_shards(tensor), strict=True):
        assert torch.equal(host[part], held)
    assert parts[1] == (slice(0, 16), slice(3, 6))


def test_a_split_tensor_names_each_device_with_its_rows(mesh: Mesh) -> None:
    text = str(view(mesh, (16, 4), ("fsdp", None)))
    assert (
        text.splitlines()[0] == "float32 [16, 4], 8 parts on 8 devices: 32 of 256 bytes per device"
    )
    assert [line.split()[-1] for line in text.splitlines()[1:]] == [f"CPU:{i}" for i in range(8)]
    assert "[2:4, :]" in text.splitlines()[2]


def test_devices_that_hold_the_same_part_share_a_line_and_a_hue(grid: Mesh) -> None:
    shown = view(grid, (8, 4), ("fsdp", None))
    lines = str(shown).splitlines()
    assert len(lines) == 1 + 4
    assert lines[1].endswith("CPU:0, CPU:4")
    hues = re.findall(r"hsl\(\d+", shown._repr_html_())
    assert len(hues) == 8
    assert hues[:4] == hues[4:]
    assert len(set(hues)) == 4


def test_a_replicated_tensor_is_whole_on_each_device(mesh: Mesh) -> None:
    shown = view(mesh, (16, 4), (None, None))
    assert "whole on each of 8 devices: 256 bytes per device" in str(shown)
    assert shown.parts == ((slice(0, 16), slice(0, 4)),)
    assert view(mesh, (), ()).bytes_per_device == 4


@pytest.mark.backends("torch_xla")  # JAX has no tensor that devices can't share evenly.
def test_padding_holds_nothing_of_the_tensor(mesh: Mesh) -> None:
    shown = view(mesh, (10,), ("fsdp",))
    assert [shard.shape for shard in shown.shards] == [(2,)] * 5 + [(0,)] * 3


def test_a_part_is_drawn_where_it_lies(mesh: Mesh) -> None:
    # Shape and placement -> where the second device's part is: x, y, width, height in pixels.
    drawn = {
        ((16, 24), ("fsdp", None)): (0.0, 5.0, 72.0, 5.0),
        ((16, 24), (None, "fsdp")): (9.0, 0.0, 9.0, 40.0),
        ((4, 16, 3), (None, "fsdp", None)): (0.0, 9.0, 40.0, 9.0),
        ((80,), ("fsdp",)): (9.0, 0.0, 9.0, 20.0),
    }
    for (shape, spec), second in drawn.items():
        html = view(mesh, shape, spec)._repr_html_()
        rect = r'<rect x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)" fill="hsl'
        x, y, width, height = map(float, re.findall(rect, html)[1])
        # The outline is one pixel wide.
        assert (x - 1, y - 1, width, height) == second


def test_a_tensor_on_the_cpu_is_refused() -> None:
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"engine\.named_tensors"):
        spmdzero.shards(torch.zeros(3))


def test_a_pending_tensor_is_refused_and_not_run(mesh: Mesh) -> None:
    pending = mesh.place(torch.ones(16, 4), ("fsdp", None)) * 2
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"spmdzero\.backend\.runtime\.sync"):
        spmdzero.shards(pending)
    runtime.sync()
    assert len(spmdzero.shards(pending).parts) == 8
