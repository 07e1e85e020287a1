"""GradientReduction: both ways out of the region give the sum over replicas, placed as planned."""

import dataclasses
import math
from typing import Literal

import pytest
import torch

from spmdzero.backend import Mesh, Torus, arrays, current, on_torus, programs, runtime
from spmdzero.backend.replica import GradientReduction
from spmdzero.plan import Layout, MeshSpec, Placement

pytestmark = pytest.mark.backends("jax", "torch_xla")

SHAPE = (8, 16)
ROW_VALUES = torch.randint(-50, 50, (8, *SHAPE), generator=torch.Generator().manual_seed(0)).float()
TOTAL = ROW_VALUES.sum(0)  # of integers: exact in any order
PLACEMENTS = {
    "shard 0": Placement(kind="shard", dim=0, reason="test"),
    "shard 1": Placement(kind="shard", dim=1, reason="test"),
    "flat": Placement(kind="flat", reason="test"),
    "replicate": Placement(kind="replicate", reason="test"),
}
Method = Literal["annotated", "explicit"]


@pytest.fixture(params=["fsdp=8", "data=2, fsdp=4"])
def any_mesh(mesh: Mesh, request: pytest.FixtureRequest) -> Mesh:
    return (
        mesh if request.param == "fsdp=8" else current().mesh(MeshSpec((("data", 2), ("fsdp", 4))))
    )


def layout_of(name: str, mesh: Mesh, shape: tuple[int, ...] = SHAPE) -> Layout:
    return Layout(placement=PLACEMENTS[name], shape=shape, mesh=mesh.spec)


def local(mesh: Mesh, rows: torch.Tensor = ROW_VALUES) -> torch.Tensor:
    """In replica space: device i holds row i."""
    spec = mesh.batch_spec(rows.dim())
    return mesh.enter(mesh.place(rows, spec), spec).squeeze(0)


@pytest.mark.parametrize("method", ["annotated", "explicit"])
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("waited", [False, True], ids=["from the region", "from a Partial"])
def test_the_reduced_gradient_is_the_sum_in_the_planned_shards(
    any_mesh: Mesh, method: Method, name: str, waited: bool
) -> None:
    layout, spec = layout_of(name, any_mesh), any_mesh.spec
    reduction = GradientReduction(any_mesh, method)
    if waited:
        partial = reduction.partial(local(any_mesh))
        runtime.sync()
        reduced = reduction.reduce_partial(partial, layout)
    else:
        reduced = reduction.reduce_local(local(any_mesh), layout)
    runtime.sync()
    assert tuple(reduced.shape) == layout.stored
    parts = {
        "shard 0": TOTAL.chunk(spec.fsdp, 0),
        "shard 1": TOTAL.chunk(spec.fsdp, 1),
        "flat": TOTAL.flatten().chunk(spec.fsdp),
        "replicate": (TOTAL,) * spec.fsdp,
    }[name] * spec.data
    shards = arrays.local_shards(reduced)
    assert [tuple(s.shape) for s in shards] == [tuple(p.shape) for p in parts]
    assert all(torch.equal(s, p) for s, p in zip(shards, parts, strict=True))


@pytest.mark.parametrize("method", ["annotated", "explicit"])
def test_a_flat_gradient_that_no_axis_divides_is_padded_with_zeros(
    any_mesh: Mesh, method: Method
) -> None:
    rows = ROW_VALUES[:, :3, :5].contiguous()  # 15 elements
    flat = layout_of("flat", any_mesh, (3, 5))
    reduced = GradientReduction(any_mesh, method).reduce_local(local(any_mesh, rows), flat)
    padded = torch.zeros(math.ceil(15 / any_mesh.spec.fsdp) * any_mesh.spec.fsdp)
    padded[:15] = rows.sum(0).flatten()
    assert torch.equal(reduced.cpu(), padded)


def test_a_partial_is_each_devices_own_gradient(any_mesh: Mesh) -> None:
    partial = GradientReduction(any_mesh, "annotated").partial(local(any_mesh))
    text = programs.optimized_hlo([partial])
    assert not any(f" {kind}(" in text for kind in ("all-reduce", "all-gather", "reduce-scatter"))
    runtime.sync()
    shards = arrays.local_shards(partial)
    assert all(torch.equal(s, r[None]) for s, r in zip(shards, ROW_VALUES, strict=True))


def test_partials_add_up_over_micro_batches_before_one_reduction(any_mesh: Mesh) -> None:
    reduction = GradientReduction(any_mesh, "annotated")
    total = reduction.partial(local(any_mesh))
    runtime.sync()
    total.add_(reduction.partial(local(any_mesh, ROW_VALUES * 2)))
    runtime.sync()
    reduced = reduction.reduce_partial(total, layout_of("shard 0", any_mesh))
    assert torch.equal(reduced.cpu(), TOTAL * 3)


@pytest.mark.parametrize("name", ["shard 0", "shard 1", "flat"])
def test_the_explicit_way_is_a_reduce_scatter_over_fsdp(any_mesh: Mesh, name: str) -> None:
    reduction = GradientReduction(any_mesh, "explicit")
    text = programs.optimized_hlo(
        [reduction.reduce_local(local(any_mesh), layout_of(name, any_mesh))]
    )
    assert text.count(" reduce-scatter(") == 1
    # The sum over the data axis is of shards, after the scatter.
    assert text.count(" all-reduce(") == (1 if any_mesh.spec.data > 1 else 0)
    assert " all-gather(" not in text


@pytest.mark.parametrize("steps", [(2, 4), (2, 2, 2)])
@pytest.mark.parametrize("name", ["shard 0", "shard 1", "flat"])
def test_in_steps_each_device_is_left_the_same_part(
    mesh: Mesh, name: str, steps: tuple[int, ...]
) -> None:
    at_once = GradientReduction(mesh, "explicit")
    reduction = dataclasses.replace(at_once, steps=steps)
    rows = ROW_VALUES.repeat(1, 1, 8) if name == "shard 1" else ROW_VALUES
    reduced, expected = (
        way.reduce_local(local(mesh, rows), layout_of(name, mesh, tuple(rows.shape[1:])))
        for way in (reduction, at_once)
    )
    assert programs.optimized_hlo([reduced]).count(" reduce-scatter(") == len(steps)
    pairs = zip(arrays.local_shards(reduced), arrays.local_shards(expected), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(reduced.cpu().flatten(), rows.sum(0).flatten())


@pytest.mark.parametrize(
    ("torus", "data", "method", "steps"),
    [
        (None, 1, "annotated", ()),
        ((2, 4), 1, "annotated", (8,)),
        ((2, 2, 2), 1, "explicit", (2, 2, 2)),
        ((2, 2, 2), 2, "explicit", ()),
        # More chips than the mesh has: nothing is known of how these are joined.
        ((4, 4), 1, "annotated", ()),
    ],
)
def test_auto_scatters_step_by_step_over_a_torus_that_libtpu_sums_over_whole(
    mesh: Mesh, torus: Torus | None, data: int, method: str, steps: tuple[int, ...]
) -> None:
    where = mesh if data == 1 else current().mesh(MeshSpec((("data", data), ("fsdp", 8 // data))))
    with on_torus(torus):
        chosen = GradientReduction.over(mesh=where, method="auto")
    assert (chosen.method, chosen.steps) == (method, steps)


@pytest.mark.parametrize("method", ["annotated", "explicit"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_narrow_wire_dtype_rounds_what_is_sent_and_gives_the_gradients_dtype_back(
    mesh: Mesh, method: Method, name: str
) -> None:
    reduction = GradientReduction(mesh, method, torch.bfloat16)
    rows = torch.full((8, *SHAPE), 1 + 2.0**-9)  # bf16 has 8 bits: 1
    reduced = reduction.reduce_local(local(mesh, rows), layout_of(name, mesh))
    assert reduced.dtype == torch.float32
    assert torch.equal(reduced.cpu().reshape(SHAPE), torch.full(SHAPE, 8.0))


@pytest.mark.parametrize("method", ["annotated", "explicit"])
def test_a_wide_wire_dtype_sums_bf16_gradients_in_fp32(mesh: Mesh, method: Method) -> None:
    rows = torch.full((8, *SHAPE), 2.0**-8, dtype=torch.bfloat16)
    rows[0] = 1.0
    reduction = GradientReduction(mesh, method, torch.float32)
    reduced = reduction.reduce_local(local(mesh, rows), layout_of("shard 0", mesh))
    assert reduced.dtype == torch.bfloat16
    # One after the other in bf16 would leave 1: 1 + 2^-8 rounds to 1. The sum is 1 + 7 * 2^-8.
    assert torch.equal(reduced.cpu(), torch.full(SHAPE, 1 + 7 * 2.0**-8).to(torch.bfloat16))
