import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import MeshSpec, ParamSpec, Placement, Role, ShardingPlan

pytestmark = pytest.mark.backends("any")

ONE_AXIS = MeshSpec((("fsdp", 8),))
TWO_AXES = MeshSpec((("data", 2), ("fsdp", 2)))

shapes = st.lists(st.integers(0, 300), max_size=4).map(tuple)
meshes = st.one_of(
    st.builds(lambda fsdp: MeshSpec((("fsdp", fsdp),)), st.integers(1, 16)),
    st.builds(
        lambda data, fsdp: MeshSpec((("data", data), ("fsdp", fsdp))),
        st.integers(1, 4),
        st.integers(1, 16),
    ),
    st.builds(
        lambda data, fsdp: MeshSpec((("data", data), ("fsdp", fsdp)), ("fsdp", "data")),
        st.integers(1, 4),
        st.integers(1, 8),
    ),
)
thresholds = st.sampled_from([0, 1, 2048])


def state_placement(shape, mesh, *, min_shard_elements=0, stage=2):
    return roles(shape, mesh, min_shard_elements=min_shard_elements, stage=stage)[Role.MOMENT]


def roles(shape, mesh, *, min_shard_elements=0, stage=2, partial=True):
    plan = ShardingPlan.build(
        [ParamSpec(name="w", shape=shape, dtype="bfloat16", trainable=True)],
        stage=stage,
        mesh=mesh,
        min_shard_elements=min_shard_elements,
        master=True,
        moments=("exp_avg", "exp_avg_sq"),
        accumulator_dtype=None,
        accumulation_steps=2,
        partial=partial,
    )
    return {role: plan["w"].placement(role) for role in Role}


def copies_of_each_element(stored, owned):
    """How many devices hold each element of the stored tensor, one count per box of elements."""
    edges = [
        sorted({0, length} | {edge for box in owned for edge in (box[d].start, box[d].stop)})
        for d, length in enumerate(stored)
    ]
    for dim_edges, length in zip(edges, stored, strict=True):
        assert dim_edges[0] == 0
        assert dim_edges[-1] == length
    count = np.zeros([len(dim_edges) - 1 for dim_edges in edges], int)
    for box in owned:
        cells = tuple(
            slice(edges[d].index(part.start), edges[d].index(part.stop))
            for d, part in enumerate(box)
        )
        count[cells] += 1
    return count


@settings(deadline=None, database=None)
@given(shape=shapes, mesh=meshes, threshold=thresholds, stage=st.sampled_from([0, 1, 2, 3]))
def test_every_element_has_the_copies_that_its_placement_promises(shape, mesh, threshold, stage):
    placements = roles(shape, mesh, min_shard_elements=threshold, stage=stage)
    for role, placement in placements.items():
        among = mesh.fsdp if role is Role.PARAMETER else mesh.shards
        copies = {"replicate": mesh.size, "partial": 1}.get(placement.kind, mesh.size // among)
        owned = placement.owned_slices(shape, mesh)
        assert len(owned) == mesh.size
        count = copies_of_each_element(placement.stored_shape(shape, mesh), owned)
        assert (count == copies).all()


@settings(deadline=None, database=None)
@given(shape=shapes, mesh=meshes, threshold=thresholds, stage=st.sampled_from([0, 1, 2]))
def test_every_device_holds_a_block_of_the_local_shape(shape, mesh, threshold, stage):
    for placement in roles(shape, mesh, min_shard_elements=threshold, stage=stage).values():
        blocks = {
            tuple(part.stop - part.start for part in box)
            for box in placement.owned_slices(shape, mesh)
        }
        assert blocks == {placement.local_shape(shape, mesh)}
        assert len(placement.partition_spec(shape, mesh)) == len(
            placement.stored_shape(shape, mesh)
        )


@settings(deadline=None, database=None)
@given(shape=shapes, mesh=meshes, threshold=thresholds)
def test_a_large_tensor_is_never_replicated(shape, mesh, threshold):
    placement = state_placement(shape, mesh, min_shard_elements=threshold)
    elements = math.prod(shape)
    must_split = mesh.shards > 1 and shape != () and elements > 0 and elements >= threshold
    assert placement.is_sharded == must_split


@settings(deadline=None, database=None)
@given(shape=shapes, mesh=meshes)
def test_padding_is_less_than_one_element_per_device_and_only_where_no_dim_divides(shape, mesh):
    placement = state_placement(shape, mesh)
    if placement.is_sharded:
        divides = any(length % mesh.shards == 0 for length in shape)
        assert placement.kind == ("shard" if divides else "flat")
    if placement.kind == "flat":
        (stored,) = placement.stored_shape(shape, mesh)
        assert 0 <= stored - math.prod(shape) < mesh.shards


@settings(deadline=None, database=None)
@given(shape=shapes, mesh=meshes, stage=st.sampled_from([0, 1, 2]), partial=st.booleans())
def test_every_placement_says_why(shape, mesh, stage, partial):
    for placement in roles(shape, mesh, stage=stage, partial=partial).values():
        assert placement.reason.strip()


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((24, 4096), 1),  # 3 rows a shard cut the 8-row tile: the compiler falls back on dim 0
        ((4096, 24), 0),  # 512 rows are whole tiles, 3 columns are not
        ((768, 3072), 0),  # both whole, the first wins: no transposing copy after its gather
        ((768, 65536), 0),  # however long the other is
        ((8192, 4096, 16), 0),  # leading dims have no tile
        ((12, 24, 4096), 2),  # dim 0 doesn't divide, dim 1 would cut a tile
        ((16, 40, 96), 0),  # the longer dims would cut a tile
        ((128, 256, 3, 3), 0),  # a convolution: two leading dims
        ((16, 64, 3, 3), 1),  # 2 channels a shard: the compiler falls back on dim 0
        ((50257, 768), 1),  # 96 columns cut a tile, but nothing else divides
        ((40, 96), 1),  # nothing whole: the longest that divides
        ((64, 512), 0),  # 8 rows are one whole tile, 64 columns are half of one
        ((4096,), 0),
    ],
)
def test_the_split_dim_is_the_first_of_whole_tpu_tiles_or_the_longest(shape, dim):
    placement = state_placement(shape, ONE_AXIS)
    assert (placement.kind, placement.dim) == ("shard", dim)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((24, 4096), "dim 1: 4,096 / 8 = 512, whole TPU tiles of 128"),
        ((4096, 24), "dim 0: 4,096 / 8 = 512, whole TPU tiles of 8"),
        ((16, 40, 96), "dim 0: 16 / 8 = 2, a leading dim, outside the TPU tile"),
        ((40, 96), "dim 1: 96 / 8 = 12, the longest dim that divides; none gives whole TPU tiles"),
    ],
)
def test_a_shard_says_its_length_and_how_it_meets_the_tiles(shape, reason):
    assert state_placement(shape, ONE_AXIS).reason == reason


@pytest.mark.parametrize(
    ("shape", "mesh", "says"),
    [
        ((2047,), ONE_AXIS, "2,047 elements < min_shard_elements 2,048"),
        ((), ONE_AXIS, "scalar"),
        ((0, 4096), ONE_AXIS, "no elements"),
        ((4096, 4096), MeshSpec((("data", 4), ("fsdp", 1))), "one device on the fsdp axis"),
    ],
)
def test_what_stays_replicated_says_which_rule_kept_it(shape, mesh, says):
    placement = state_placement(shape, mesh, min_shard_elements=2048)
    assert placement.kind == "replicate"
    assert says in placement.reason


def test_threshold_counts_from_the_first_tensor_that_is_split():
    assert state_placement((2048,), ONE_AXIS, min_shard_elements=2048).kind == "shard"


def test_flat_pads_the_flattened_tensor_to_the_fsdp_axis():
    placement = state_placement((13, 7), ONE_AXIS)
    assert placement.stored_shape((13, 7), ONE_AXIS) == (96,)
    assert placement.local_shape((13, 7), ONE_AXIS) == (12,)
    assert placement.partition_spec((13, 7), ONE_AXIS) == ("fsdp",)
    assert placement.short((13, 7), ONE_AXIS) == "F(pad 91->96)"
    assert "91 padded to 96" in placement.reason


def test_flat_without_padding_says_so():
    placement = state_placement((6, 4), ONE_AXIS)
    assert placement.stored_shape((6, 4), ONE_AXIS) == (24,)
    assert placement.short((6, 4), ONE_AXIS) == "F"
    assert "padded" not in placement.reason


def test_shards_follow_the_fsdp_axis_and_repeat_over_data():
    placement = Placement(kind="shard", dim=1, reason="given")
    left, right = (slice(0, 3), slice(0, 2)), (slice(0, 3), slice(2, 4))
    assert placement.owned_slices((3, 4), TWO_AXES) == (left, right, left, right)
    assert placement.partition_spec((3, 4), TWO_AXES) == (None, "fsdp")
    assert placement.short((3, 4), TWO_AXES) == "S(1)"


def test_partial_puts_row_i_on_device_i_of_a_two_axis_mesh():
    placement = Placement(kind="partial", reason="given")
    assert placement.stored_shape((3, 4), TWO_AXES) == (4, 3, 4)
    assert placement.partition_spec((3, 4), TWO_AXES) == (("data", "fsdp"), None, None)
    rows = [box[0] for box in placement.owned_slices((3, 4), TWO_AXES)]
    assert rows == [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)]
    assert placement.partition_spec((3,), ONE_AXIS) == ("fsdp", None)


@pytest.mark.parametrize(("shape", "dim"), [((9, 8), 0), ((8,), 1), ((8,), -1)])
def test_a_shard_that_the_mesh_can_not_cut_is_refused(shape, dim):
    with pytest.raises(SpmdZeroUsageError, match=f"dim {dim} over 8 devices"):
        Placement(kind="shard", dim=dim, reason="given").local_shape(shape, ONE_AXIS)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "shard", "reason": "no dim"},
        {"kind": "flat", "dim": 0, "reason": "a dim too many"},
        {"kind": "replicate", "reason": ""},
    ],
)
def test_a_placement_without_meaning_is_refused(fields):
    with pytest.raises(SpmdZeroUsageError):
        Placement(**fields)
