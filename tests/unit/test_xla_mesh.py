"""Tensors on the mesh: what each device holds, and what never travels."""

import math

import pytest
import torch
import torch_xla.debug.metrics as met

from spmdzero.backend import REPLICATED, gather, store
from spmdzero.backend.torch_xla import (
    DeviceMesh,
    counters,
    global_norm,
    local_shards,
    optimized_hlo,
    runtime,
    sharding_of,
)
from spmdzero.backend.torch_xla.mesh import fresh
from spmdzero.backend.torch_xla.region import watch_reads
from spmdzero.plan import Layout, MeshSpec, Placement

pytestmark = pytest.mark.backends("torch_xla")

TWO_AXES = MeshSpec((("data", 2), ("fsdp", 4)))
PLACEMENTS = {
    "replicate": Placement(kind="replicate", reason="test"),
    "shard 0": Placement(kind="shard", dim=0, reason="test"),
    "shard 1": Placement(kind="shard", dim=1, reason="test"),
    "flat": Placement(kind="flat", reason="test"),
}
HOST = torch.arange(16 * 24.0).reshape(16, 24)


@pytest.fixture(params=["fsdp=8", "data=2, fsdp=4"])
def any_mesh(mesh: DeviceMesh, request: pytest.FixtureRequest) -> DeviceMesh:
    return mesh if request.param == "fsdp=8" else DeviceMesh(TWO_AXES)


def shapes(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    runtime.sync()
    return [tuple(shard.shape) for shard in local_shards(tensor)]


def transfers_from_device() -> int:
    data = met.metric_data("TransferFromDeviceTime")
    return data[0] if data else 0


# -- reads -----------------------------------------------------------------------------------

READS = {
    "cpu": lambda tensor: tensor.cpu(),
    "to": lambda tensor: tensor.to("cpu", torch.float32),
    "tolist": lambda tensor: torch.tensor(tensor.tolist()),
    "copy_": lambda tensor: torch.empty(tensor.shape).copy_(tensor),
}


@pytest.mark.parametrize("name", READS)
def test_a_split_tensor_is_read_from_the_devices_without_a_program(
    any_mesh: DeviceMesh, name: str
) -> None:
    watch_reads(any_mesh)
    for dim in (0, 1):
        placed = any_mesh.place(HOST, any_mesh.batch_spec(2, dim=dim)) * 2
        any_mesh.mark(placed, any_mesh.batch_spec(2, dim=dim))
        runtime.sync()
        before = counters.compiled()[0]
        assert torch.equal(READS[name](placed), HOST * 2)
        assert counters.compiled()[0] == before


def test_rows_that_the_devices_hold_unevenly_are_read_without_their_padding(
    mesh: DeviceMesh,
) -> None:
    watch_reads(mesh)
    placed = mesh.place(HOST[:13], mesh.batch_spec(2))
    assert torch.equal(placed.cpu(), HOST[:13])


# -- uploads ---------------------------------------------------------------------------------


def test_each_device_holds_its_part_of_what_is_placed(any_mesh: DeviceMesh) -> None:
    fsdp, data = any_mesh.spec.fsdp, any_mesh.spec.data
    expected = {
        any_mesh.batch_spec(2): HOST.split(2),
        any_mesh.batch_spec(2, dim=1): HOST.split(3, dim=1),
        ("fsdp", None): HOST.split(16 // fsdp) * data,
        None: [HOST] * 8,
    }
    for spec, parts in expected.items():
        placed = any_mesh.place(HOST, spec)
        shards = local_shards(placed)
        assert all(torch.equal(s, part) for s, part in zip(shards, parts, strict=True)), spec
        assert torch.equal(placed.cpu(), HOST), spec


def test_place_uploads_shards_and_not_copies_of_the_whole(mesh: DeviceMesh) -> None:
    def uploaded() -> float:
        return met.metric_data("OutboundData")[1]

    local_shards(mesh.place(HOST, ("fsdp", None)))
    before = uploaded()
    local_shards(mesh.place(HOST, ("fsdp", None)))
    assert uploaded() - before == HOST.nbytes
    before = uploaded()
    local_shards(mesh.place(HOST))
    assert uploaded() - before == 8 * HOST.nbytes


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool]
)
def test_place_keeps_dtype_and_values(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    host = (HOST[:, :8] % 2).to(dtype)
    placed = mesh.place(host, ("fsdp", None))
    assert placed.dtype == dtype
    assert torch.equal(placed.cpu(), host)


def test_zeros_are_born_as_shards(any_mesh: DeviceMesh) -> None:
    zeros = any_mesh.zeros((16, 24), torch.bfloat16, ("fsdp", None))
    assert shapes(zeros) == [(16 // any_mesh.spec.fsdp, 24)] * 8
    assert zeros.cpu().count_nonzero() == 0


# -- store, gather, fresh --------------------------------------------------------------------


@pytest.mark.parametrize("name", PLACEMENTS)
def test_store_holds_what_the_placement_says_and_gather_gives_the_tensor_back(
    any_mesh: DeviceMesh, name: str
) -> None:
    host = HOST[:9, :3].contiguous() if name == "flat" else HOST  # 27: 8 and 4 don't divide it
    layout, n = layout_of(name, host, any_mesh), any_mesh.spec.fsdp
    stored = store(any_mesh, any_mesh.place(host), layout)
    expected = {
        "replicate": (16, 24),
        "shard 0": (16 // n, 24),
        "shard 1": (16, 24 // n),
        "flat": (math.ceil(27 / n),),
    }[name]
    assert shapes(stored) == [expected] * 8
    updated = any_mesh.mark(stored + 1, layout.spec)
    whole = gather(any_mesh, updated, layout)
    any_mesh.mark(whole, REPLICATED)
    assert shapes(whole) == [tuple(host.shape)] * 8
    assert torch.equal(whole.cpu(), host + 1)


def layout_of(name: str, host: torch.Tensor, mesh: DeviceMesh) -> Layout:
    return Layout(placement=PLACEMENTS[name], shape=tuple(host.shape), mesh=mesh.spec)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_store_and_gather_move_nothing_to_the_host(mesh: DeviceMesh, name: str) -> None:
    parameter, layout = mesh.place(HOST), layout_of(name, HOST, mesh)
    local_shards(parameter)
    before = transfers_from_device()
    stored = store(mesh, parameter, layout)
    runtime.sync()
    parameter.copy_(gather(mesh, mesh.mark(stored + 1, layout.spec), layout))
    mesh.mark(parameter, REPLICATED)
    runtime.sync()
    runtime.wait()
    assert transfers_from_device() == before
    assert shapes(parameter) == [(16, 24)] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_fresh_copy_may_be_sharded_on_the_devices(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    host = (HOST % 3).to(dtype)
    source = mesh.place(host)
    local_shards(source)
    before = transfers_from_device()
    copy = mesh.mark(fresh(source), ("fsdp", None))
    runtime.sync()
    runtime.wait()
    assert transfers_from_device() == before
    assert shapes(copy) == [(2, 24)] * 8
    assert shapes(source) == [(16, 24)] * 8
    assert copy.dtype == dtype
    assert torch.equal(copy.cpu(), host)


# -- annotations -----------------------------------------------------------------------------


def test_mark_returns_the_tensor_as_it_says(mesh: DeviceMesh) -> None:
    tensor = mesh.place(HOST) * 2
    assert mesh.mark(tensor, REPLICATED) is tensor
    assert sharding_of(tensor) == "{replicated}"
    split = mesh.mark(mesh.place(HOST) * 2, ("fsdp", None))
    assert "devices=[8,1]" in sharding_of(split)


def test_an_annotation_is_built_once(mesh: DeviceMesh) -> None:
    assert mesh.operation(("fsdp", None)) is mesh.operation(("fsdp", None))
    assert mesh.operation(("fsdp", None)) is not mesh.operation((None, "fsdp"))


def test_groups_hold_the_devices_that_differ_on_one_axis(mesh: DeviceMesh) -> None:
    assert mesh.groups("fsdp") == [[[0, 1, 2, 3, 4, 5, 6, 7]]]
    two = DeviceMesh(TWO_AXES)
    assert two.groups("fsdp") == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert two.groups("data") == [[[0, 4], [1, 5], [2, 6], [3, 7]]]


def test_in_steps_the_groups_are_the_factors_of_an_axis_slowest_first(mesh: DeviceMesh) -> None:
    by_column, by_row = mesh.groups("fsdp", (2, 4))
    assert by_column == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert by_row == [[0, 1, 2, 3], [4, 5, 6, 7]]


# -- the global norm -------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", ["sharded", "replicated", "both"])
def test_global_norm_equals_torchs_over_all_elements(any_mesh: DeviceMesh, kinds: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {(16, 24): ("fsdp", None), (3, 8): (None, "fsdp"), (5,): (None,), (): ()}
    tensors = {size: torch.randn(size, generator=generator) for size in sizes}
    chosen = {
        size: spec
        for size, spec in sizes.items()
        if kinds == "both" or ("fsdp" in spec) == (kinds == "sharded")
    }
    pairs = [(any_mesh.place(tensors[size], spec), spec) for size, spec in chosen.items()]
    norm = global_norm(pairs, any_mesh)
    expected = torch.cat([tensors[size].flatten() for size in chosen]).double().norm()
    assert (norm.dim(), norm.dtype) == (0, torch.float32)
    # 400 squares of order 1 summed in fp32: 20 (their root) * 6e-8.
    torch.testing.assert_close(norm.cpu().double(), expected, rtol=2e-6, atol=0)
    assert shapes(norm) == [()] * 8


def test_global_norm_of_bf16_tensors_is_summed_in_fp32(mesh: DeviceMesh) -> None:
    host = torch.full((1024,), 1.0, dtype=torch.bfloat16)
    host[:8] = 0.0  # in bf16 the sum of squares would stop at 256
    norm = global_norm([(mesh.place(host, ("fsdp",)), ("fsdp",))], mesh)
    assert norm.item() == pytest.approx(math.sqrt(1016), rel=1e-6)


def test_global_norm_sends_one_scalar_for_all_sharded_tensors(any_mesh: DeviceMesh) -> None:
    pairs = [(any_mesh.place(HOST + i, ("fsdp", None)), ("fsdp", None)) for i in range(3)]
    text = optimized_hlo([global_norm(pairs, any_mesh)])
    collectives = [line for line in text.splitlines() if " all-reduce(" in line]
    assert len(collectives) == 1
    assert "f32[] all-reduce(" in collectives[0]
    assert not any(f" {kind}(" in text for kind in ("all-gather", "all-to-all", "reduce-scatter"))
