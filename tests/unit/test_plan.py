import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from spmdzero.config import load_config
from spmdzero.engine import initialize
from spmdzero.engine._plan_of import plan_of
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroError, SpmdZeroUsageError
from spmdzero.plan import MeshSpec, ParamSpec, Role, ShardingPlan

pytestmark = pytest.mark.backends("any")

MESH = MeshSpec((("fsdp", 8),))
SPLIT, SMALL, ODD = (1024, 1024), (64,), (91, 37)


def param(name="w", *, shape=SPLIT, dtype="bfloat16", trainable=True):
    return ParamSpec(name=name, shape=shape, dtype=dtype, trainable=trainable)


def build(*params, **overrides):
    settings = {
        "stage": 2,
        "mesh": MESH,
        "master": True,
        "moments": ("exp_avg", "exp_avg_sq"),
        "accumulator_dtype": None,
        "accumulation_steps": 4,
    }
    return ShardingPlan.build(params, **{**settings, **overrides})


def kinds(plan, name="w"):
    placements = {role: plan[name].placement(role) for role in Role}
    return {role: placement and placement.kind for role, placement in placements.items()}


@pytest.mark.parametrize(("shape", "split"), [(SPLIT, "shard"), (ODD, "flat")])
@pytest.mark.parametrize(
    ("stage", "partial", "accumulator", "state"),
    [
        (0, True, "partial", "replicate"),
        (0, False, "replicate", "replicate"),
        (1, True, "partial", "split"),
        (1, False, "split", "split"),
        (2, True, "split", "split"),
        (2, False, "split", "split"),
        (3, True, "split", "split"),
    ],
)
def test_the_zero_table_role_by_role(shape, split, stage, partial, accumulator, state):
    accumulator, state = (split if kind == "split" else kind for kind in (accumulator, state))
    # A module's parameter keeps its shape, so that no part of a flat one could be a device's.
    parameter = "shard" if stage == 3 and split == "shard" else "replicate"
    assert kinds(build(param(shape=shape), stage=stage, partial=partial)) == {
        Role.PARAMETER: parameter,
        Role.ACCUMULATOR: accumulator,
        Role.GRADIENT: state,
        Role.MASTER: state,
        Role.MOMENT: state,
    }


@pytest.mark.parametrize(
    ("stage", "accumulator"), [(0, "partial"), (1, "partial"), (2, "replicate")]
)
def test_a_small_tensor_keeps_replicated_states_at_every_stage(stage, accumulator):
    found = kinds(build(param(shape=SMALL), stage=stage))
    assert found.pop(Role.ACCUMULATOR) == accumulator
    assert set(found.values()) == {"replicate"}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("partial", [True, False])
def test_all_sharded_roles_of_a_tensor_are_cut_the_same_way(stage, partial):
    tensor = build(param(shape=(24, 4096)), stage=stage, partial=partial)["w"]
    cuts = {
        (state.placement.kind, state.placement.dim)
        for state in tensor.states
        if state.placement.is_sharded
    }
    assert cuts == {("shard", 1)}


@pytest.mark.parametrize("stage", [0, 1])
def test_the_global_forward_says_why_its_accumulator_is_not_partial(stage):
    placement = build(param(), stage=stage, partial=False)["w"].placement(Role.ACCUMULATOR)
    assert "every micro-batch is reduced at once" in placement.reason


def test_one_micro_batch_needs_no_accumulator():
    assert kinds(build(param(), accumulation_steps=1))[Role.ACCUMULATOR] is None


def test_an_fp32_parameter_is_its_own_master():
    plan = build(param("half"), param("full", dtype="float32"))
    assert plan["half"].dtype(Role.MASTER) == "float32"
    assert plan["full"].placement(Role.MASTER) is None
    with pytest.raises(SpmdZeroUsageError, match="full has no master"):
        plan["full"].dtype(Role.MASTER)


def test_master_weights_exist_only_on_request():
    assert kinds(build(param(), master=False))[Role.MASTER] is None


def test_an_optimizer_without_slots_has_no_moments():
    assert kinds(build(param(), moments=()))[Role.MOMENT] is None


def test_a_frozen_parameter_has_no_gradient_and_no_state():
    found = kinds(build(param(dtype="int64", trainable=False)))
    assert found.pop(Role.PARAMETER) == "replicate"
    assert set(found.values()) == {None}


def test_each_role_has_its_own_dtype():
    tensor = build(param(), accumulator_dtype="float32", moment_dtype="bfloat16")["w"]
    assert [tensor.dtype(role) for role in Role] == [
        "bfloat16",
        "float32",
        "float32",
        "float32",
        "bfloat16",
    ]
    assert build(param(dtype="float16"))["w"].dtype(Role.GRADIENT) == "float16"


def test_a_slot_has_its_own_dtype_or_that_of_all_slots_at_every_stage():
    plan = build(param(), moment_dtype="bfloat16", slot_dtypes=(("exp_avg_sq", "float32"),))
    for each in (plan, plan.at_stage(3), plan.with_states_on_host(), plan.with_accumulation(1)):
        found = [each.slot_dtype(slot) for slot in ("exp_avg", "exp_avg_sq", "other")]
        assert found == ["bfloat16", "float32", "bfloat16"]
    assert ShardingPlan.from_json(plan.to_json()) == plan
    assert plan != build(param(), moment_dtype="bfloat16")


def test_a_plan_keeps_the_order_of_the_model():
    plan = build(param("b"), param("a"), param("c"))
    assert plan.names == ("b", "a", "c")
    assert [tensor.name for tensor in plan] == ["b", "a", "c"]
    assert plan["a"].shape == SPLIT
    assert len(plan) == 3


def test_at_stage_changes_the_stage_and_nothing_else():
    params = [param("w"), param("b", shape=SMALL), param("f", trainable=False)]
    settings = {"min_shard_elements": 7, "partial": False, "moment_dtype": "bfloat16"}
    one = build(*params, stage=1, **settings)
    assert one.at_stage(2) == build(*params, stage=2, **settings)
    assert one.at_stage(2) != one
    assert one.at_stage(1) == one


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"stage": 4}, "zero_optimization.stage"),
        ({"min_shard_elements": -1}, "spmd.min_shard_elements"),
        ({"accumulation_steps": 0}, "gradient_accumulation_steps"),
    ],
)
def test_settings_out_of_range_name_their_key(overrides, key):
    with pytest.raises(SpmdZeroConfigError) as caught:
        build(param(), **overrides)
    assert caught.value.key == key


def test_two_parameters_of_one_name_are_refused():
    with pytest.raises(SpmdZeroUsageError, match="same name"):
        build(param("w"), param("w"))


@pytest.mark.parametrize(
    "overrides",
    [
        {"master_dtype": "f32"},
        {"moment_dtype": "torch.float32"},
        {"slot_dtypes": (("exp_avg", "bf16"),)},
    ],
)
def test_unknown_dtypes_are_refused(overrides):
    with pytest.raises(SpmdZeroUsageError, match="unknown dtype"):
        build(param(), **overrides)


def test_the_plan_of_a_config_and_a_model_is_the_engines_and_needs_no_device():
    model = {"type": "Muon", "params": {"lr": 0.1}}
    spmd = {"mesh": {"data": 2, "fsdp": 4}, "min_shard_elements": 16}
    for more in (
        {},
        {"optimizer": model, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
        {"optimizer": {"type": "RMSprop"}, "gradient_accumulation_steps": 2, "spmd": spmd},
    ):
        allowed = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
        with torch.device("meta"):
            shapes = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8, bias=False))
        found = plan_of(load_config(allowed | more), shapes, devices=8)
        module = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8, bias=False))
        assert found == initialize(model=module, config=allowed | more)[0].plan


plans = st.builds(
    lambda tensors, **settings: build(
        *(
            param(f"layer.{index}", shape=tuple(shape), dtype=dtype, trainable=trainable)
            for index, (shape, dtype, trainable) in enumerate(tensors)
        ),
        **settings,
    ),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 300), max_size=4),
            st.sampled_from(["float32", "bfloat16"]),
            st.booleans(),
        ),
        max_size=4,
    ),
    stage=st.sampled_from([0, 1, 2]),
    mesh=st.sampled_from([MESH, MeshSpec((("data", 3), ("fsdp", 5)))]),
    accumulator_dtype=st.sampled_from([None, "float32"]),
    accumulation_steps=st.integers(1, 3),
    partial=st.booleans(),
)


@settings(deadline=None, database=None)
@given(plan=plans)
def test_json_brings_back_an_equal_plan(plan):
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_json_keeps_the_stored_placements_rather_than_choosing_again():
    document = json.loads(build(param()).to_json())
    for state in document["plan"]["tensors"][0]["states"]:
        if state["placement"]["kind"] == "shard":
            state["placement"]["dim"] = 1 - state["placement"]["dim"]
    loaded = ShardingPlan.from_json(json.dumps(document))
    chosen = build(param())["w"].placement(Role.MOMENT)
    assert loaded["w"].placement(Role.MOMENT).dim == 1 - chosen.dim


def _changed(path, value):
    document = json.loads(build(param()).to_json())
    target = document
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    return json.dumps(document)


MOMENT_PLACEMENT = ("plan", "tensors", 0, "states", 4, "placement")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "no version"),
        ("{}", "no version"),
        (_changed(["version"], 99), "version 99 can't be read"),
        ('{"version": 1}', "malformed"),
        (_changed(["plan", "stage"], "2"), "malformed at stage"),
        (_changed(["plan", "stage"], 4), "stages 0 to 3"),
        (_changed(["plan", "mesh", "axes"], [["fsdp", 0]]), "at least 1"),
        (_changed([*MOMENT_PLACEMENT, "kind"], "split"), r"states\.4\.placement\.kind"),
        (_changed([*MOMENT_PLACEMENT, "dim"], 5), "can't be sharded on dim 5"),
        (_changed([*MOMENT_PLACEMENT, "dim"], None), "a dim belongs to 'shard'"),
    ],
)
def test_json_that_is_no_plan_is_refused_with_the_place(text, says):
    with pytest.raises(SpmdZeroError, match=says):
        ShardingPlan.from_json(text)


# -- stage 3 ---------------------------------------------------------------------------------


def test_at_stage_3_a_frozen_parameter_rests_as_a_shard_and_a_persistent_one_whole():
    frozen, small = (
        param(trainable=False),
        ParamSpec(name="small", shape=SPLIT, dtype="bfloat16", trainable=True, persistent=True),
    )
    plan = build(frozen, small, stage=3)
    assert plan.at_rest("parameter/w").spec == ("fsdp", None)
    assert plan.in_use("parameter/w").spec == (None, None)
    assert plan.at_rest("parameter/small").spec == (None, None)
    assert plan.at_rest("master/small").spec == ("fsdp", None)
    assert "stage3_param_persistence_threshold" in plan.at_rest("parameter/small").placement.reason


# -- layouts ---------------------------------------------------------------------------------


def test_the_plan_says_of_each_state_where_it_rests():
    plan = build(param(shape=(64, 61)), param("odd", shape=(61, 37)))
    assert plan.at_rest("parameter/w").spec == (None, None)
    for state in ("accumulator/w", "gradient/w", "master/w", "exp_avg/w"):
        assert plan.at_rest(state).spec == ("fsdp", None)
        assert plan.in_use(state) == plan.at_rest(state)
    flat = plan.at_rest("exp_avg/odd")
    assert (flat.spec, flat.stored, flat.local) == (("fsdp",), (2264,), (283,))


@pytest.mark.parametrize("state", ["buffer/running_mean", "counter/applied", "norm", "mu/w"])
def test_what_the_plan_does_not_split_is_whole_on_every_device(state):
    assert build(param()).at_rest(state).spec == ()


def test_a_state_that_a_parameter_has_not_is_an_error():
    plan = build(param(trainable=False))
    with pytest.raises(SpmdZeroUsageError, match="w has no gradient, only: parameter"):
        plan.at_rest("gradient/w")
