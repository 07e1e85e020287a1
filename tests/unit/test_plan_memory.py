import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.plan import MeshSpec, ParamSpec, Role, ShardingPlan, itemsize

pytestmark = pytest.mark.backends("any")

# numpy has no bfloat16.
BYTES = {"float32": np.dtype("float32").itemsize, "bfloat16": np.dtype("float16").itemsize}


def build(params, **overrides):
    settings = {
        "stage": 2,
        "mesh": MeshSpec((("fsdp", 64),)),
        "master": True,
        "moments": ("exp_avg", "exp_avg_sq"),
        "accumulator_dtype": None,
        "accumulation_steps": 1,
    }
    return ShardingPlan.build(params, **{**settings, **overrides})


def param(name="w", *, shape, dtype="bfloat16", trainable=True):
    return ParamSpec(name=name, shape=shape, dtype=dtype, trainable=trainable)


@settings(deadline=None, database=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 300), max_size=4).map(tuple), max_size=3),
    axes=st.tuples(st.integers(1, 4), st.integers(1, 16)),
    stage=st.sampled_from([0, 1, 2]),
    slots=st.integers(0, 2),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    steps=st.integers(1, 2),
    partial=st.booleans(),
)
def test_bytes_are_those_of_the_slices_that_any_device_owns(
    shapes, axes, stage, slots, dtype, steps, partial
):
    mesh = MeshSpec((("data", axes[0]), ("fsdp", axes[1])))
    plan = build(
        [param(f"w{i}", shape=shape, dtype=dtype) for i, shape in enumerate(shapes)],
        stage=stage,
        mesh=mesh,
        moments=("momentum", "variance")[:slots],
        accumulation_steps=steps,
        partial=partial,
    )
    report, everything = plan.memory(), np.zeros(mesh.size, np.int64)
    for role in Role:
        held = np.zeros(mesh.size, np.int64)
        for tensor in plan:
            if (placement := tensor.placement(role)) is None:
                continue
            for device, box in enumerate(placement.owned_slices(tensor.shape, mesh)):
                lengths = [part.stop - part.start for part in box]
                held[device] += np.prod(lengths, dtype=np.int64) * BYTES[tensor.dtype(role)]
        held *= slots if role is Role.MOMENT else 1
        assert (held == report[role]).all()
        everything += held
    assert (everything == report.total).all()


def test_the_published_example_of_the_zero_paper():
    # ZeRO, arXiv 1910.02054, figure 1: 7.5 B parameters, 64 devices: 120, 31.4, 16.6, 1.9 GB.
    comparison = build([param(shape=(7_500_000_000,))]).compare()
    # The figure rounds to 0.1 GB.
    assert [round(size / 1e9, 1) for size in comparison.paper] == [120.0, 31.4, 16.6, 1.9]


def test_the_plan_meets_the_paper_where_both_count_the_gradient_alike():
    # Nothing is padded or small here, so the stages 0, 2 and 3 must agree to the byte.
    plan = build([param(shape=(4096, 1024)), param("v", shape=(64, 4096))])
    comparison = plan.compare()
    assert comparison.stages[0].total == comparison.paper[0]
    assert comparison.stages[2].total == comparison.paper[2]
    assert comparison.stages[3].total == comparison.paper[3]
    # At stage 1 the paper counts the whole gradient: with several micro-batches that is our
    # ACCUMULATOR, and the shard of the gradient at the step comes on top.
    several = build([t.param for t in plan], accumulation_steps=4).compare()
    assert several.stages[1].total == several.paper[1] + several.stages[1][Role.GRADIENT]


def test_the_formula_counts_the_fsdp_axis_only():
    wide = build([param(shape=(64, 4096))], mesh=MeshSpec((("data", 4), ("fsdp", 8))))
    alone = build([param(shape=(64, 4096))], mesh=MeshSpec((("fsdp", 8),)))
    assert wide.compare().paper == alone.compare().paper


def test_a_tensor_axis_halves_what_it_splits_at_all_stages():
    split = ParamSpec(name="w", shape=(4096, 1024), dtype="bfloat16", trainable=True, tensor_dim=0)
    shared = build([split], mesh=MeshSpec((("fsdp", 4), ("tensor", 2)))).compare()
    half = build([param(shape=(2048, 1024))], mesh=MeshSpec((("fsdp", 4),))).compare()
    assert [stage.total for stage in shared.stages] == [stage.total for stage in half.stages]
    assert shared.paper == half.paper
    assert "what one device of the tensor axis has" in shared.paper_note


def test_the_formula_counts_a_groups_parameters_and_all_devices_states():
    mesh = MeshSpec((("data", 4), ("fsdp", 8)), ("fsdp", "data"))
    comparison = build(
        [param(shape=(4096, 1024)), param("v", shape=(64, 4096))], mesh=mesh
    ).compare()
    psi = 4096 * 1024 + 64 * 4096
    assert comparison.paper[3] == 2 * psi // 8 + 14 * psi // 32
    assert comparison.stages[2].total == comparison.paper[2]
    assert comparison.stages[3].total == comparison.paper[3]
    assert "N = 32 (both axes; at stage 3 parameters have the 8 of fsdp)" in comparison.paper_note


def test_the_formula_is_left_out_where_it_does_not_apply():
    for dtype, trainable, overrides in (
        ("float32", True, {}),
        ("bfloat16", False, {}),
        ("bfloat16", True, {"moments": ("momentum",)}),
        ("bfloat16", True, {"accumulator_dtype": "float32"}),
        ("bfloat16", True, {"moment_dtype": "bfloat16"}),
        ("bfloat16", True, {"slot_dtypes": (("exp_avg_sq", "bfloat16"),)}),
        ("bfloat16", True, {"master": False}),
        ("bfloat16", True, {"master_dtype": "float64"}),
    ):
        params = [param(shape=(64, 4096)), param("x", shape=(8,), dtype=dtype, trainable=trainable)]
        comparison = build(params, **overrides).compare()
        assert comparison.paper is None
        assert "doesn't apply" in comparison.paper_note
        assert "ZeRO paper" not in str(comparison)


def test_each_slot_costs_the_bytes_of_its_own_dtype_on_devices_and_hosts():
    own = ParamSpec(
        name="v", shape=(1024, 64), dtype="bfloat16", trainable=True, moments=("exp_avg",)
    )
    for usual, slots, each in (
        ("float32", {"exp_avg": "bfloat16"}, (2 + 4, 2)),
        ("bfloat16", {"exp_avg_sq": "float32"}, (2 + 4, 2)),
        ("float32", {"exp_avg_sq": "bfloat16", "momentum": "bfloat16"}, (4 + 2, 4)),
    ):
        plan = build(
            [param(shape=(1024, 64)), own], moment_dtype=usual, slot_dtypes=tuple(slots.items())
        )
        bytes_ = 1024 * sum(each)
        assert plan.memory()[Role.MOMENT] == bytes_
        stages = [stage[Role.MOMENT] for stage in plan.compare().stages]
        assert stages == [64 * bytes_, bytes_, bytes_, bytes_]
        hosts = plan.with_states_on_host().memory()
        assert (hosts[Role.MOMENT], dict(hosts.on_host)[Role.MOMENT]) == (0, bytes_)
        rows = [line.split() for line in str(plan).splitlines()]
        assert ["moment", f"{bytes_:,}"] in rows


def test_frozen_parameters_cost_their_bytes():
    for dtype in ("bool", "uint8", "int16", "float16", "int32", "int64"):
        for shape in ((3,), (2, 5)):
            report = build([param(shape=shape, dtype=dtype, trainable=False)]).memory()
            size = math.prod(shape) * np.dtype(dtype).itemsize
            assert report.total == report[Role.PARAMETER] == size


def test_itemsizes_are_numpys_and_an_unknown_dtype_is_refused():
    for dtype in ("float64", "complex64", "complex128"):
        assert itemsize(dtype) == np.dtype(dtype).itemsize
    with pytest.raises(SpmdZeroUsageError, match=r"unknown dtype 'torch\.float32'"):
        itemsize("torch.float32")


def test_what_rests_on_the_host_is_counted_apart_and_small_states_stay():
    plain = build([param("wide", shape=(1024, 64)), param("bias", shape=(64,))])
    plan = plain.with_states_on_host()
    memory, before = plan.memory(), plain.memory()
    assert memory.on_host == tuple(
        (role, {Role.MASTER: 4 * 1024, Role.MOMENT: 2 * 4 * 1024}.get(role, 0)) for role in Role
    )
    assert memory.total + memory.host_total == before.total
    assert (memory[Role.MASTER], memory[Role.MOMENT]) == (4 * 64, 2 * 4 * 64)
    there = [plan.at_rest(f"{slot}/wide").on_host for slot in ("master", "exp_avg", "gradient")]
    assert there == [True, True, False]
    assert not plan.in_use("master/wide").on_host
    assert not plan.at_rest("master/bias").on_host
    assert "in host memory master 4,096, moment 8,192, total 12,288" in memory.__str__()
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert "in host memory" in str(plan)
    assert plain.on_host == ()
