"""The precision sections, and what DeepSpeed refuses of keys that are each right alone."""

import pytest
import torch

from spmdzero.config import load_config
from spmdzero.precision import GradientScaling, PrecisionPolicy
from tests.support.refusals import refused

pytestmark = pytest.mark.backends("any")


def test_each_spelling_of_a_dtype_that_deepspeed_takes_is_read():
    spellings = {
        "fp32": ("fp32", "FP32", "float", "torch.float32"),
        "fp16": ("fp16", "half", "float16", "torch.float16"),
        "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    }
    for canonical, written in spellings.items():
        for spelling in written:
            config = load_config({"torch_autocast": {"dtype": spelling}})
            assert config.torch_autocast.dtype == canonical


@pytest.mark.parametrize("name", ["loss_scale_window", "min_loss_scale"])
def test_a_dynamic_scale_needs_positive_rules_and_a_static_one_does_not(name):
    error = refused({"fp16": {"enabled": True, name: 0}})
    assert (error.key, error.value) == (f"fp16.{name}", 0)
    load_config({"fp16": {"enabled": True, "loss_scale": 128, name: 0}})
    load_config({"fp16": {"enabled": False, name: 0}})


def test_bf16_and_fp16_exclude_each_other():
    assert refused({"bf16": {"enabled": True}, "fp16": {"enabled": True}}).key == "fp16.enabled"


def test_autocast_stands_beside_bf16_and_not_beside_fp16():
    beside = load_config({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}})
    policy = PrecisionPolicy.from_config(beside)
    assert policy.parameter == policy.autocast == torch.bfloat16
    error = refused({"torch_autocast": {"enabled": True}, "fp16": {"enabled": True}})
    assert error.key == "torch_autocast.enabled"
    assert "enable bf16" in error.fix


LOW = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize(("dtype", "reason"), [("float16", "loss scale"), ("fp32", "off")])
def test_autocast_is_refused_in_any_dtype_but_bf16(dtype, reason):
    error = refused({"torch_autocast": {"enabled": True, "dtype": dtype}})
    assert error.key == "torch_autocast.dtype"
    assert reason in error.reason
    assert "bfloat16" in error.fix
    load_config({"torch_autocast": {"enabled": False, "dtype": dtype}})


def test_bf16_master_weights_and_states_go_together_with_zero():
    for stage in (1, 2):
        bf16 = load_config({"bf16": LOW, "zero_optimization": {"stage": stage}}).bf16
        assert bf16.bf16_master_weights_and_grads
        assert bf16.bf16_optimizer_states
    assert refused({"bf16": LOW}).key == "bf16.bf16_master_weights_and_grads"


def test_a_parameter_dtype_that_the_sections_choose_is_accepted():
    for section, dtype in (({"bf16": {"enabled": True}}, "bf16"), ({}, "fp32")):
        load_config(section | {"data_types": {"param_dtype": dtype}})


@pytest.mark.parametrize(
    "scaling", [{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}]
)
def test_scaling_before_the_reduction_is_refused_where_deepspeed_refuses_it(scaling):
    at_stage_2 = {"zero_optimization": {"stage": 2}}
    assert refused(scaling | at_stage_2).key == next(iter(scaling))
    load_config(scaling | {"zero_optimization": {"stage": 1}})
    load_config(scaling | {"zero_optimization": {"stage": 2, "reduce_scatter": False}})
    load_config(scaling | at_stage_2 | {"gradient_allreduce_op": "sum"})


def test_the_operation_and_the_log_level_are_read_in_any_case():
    config = load_config({"gradient_allreduce_op": "SUM", "log_level": "INFO"})
    assert (config.gradient_allreduce_op, config.log_level) == ("sum", "info")


def communicated(**config):
    return PrecisionPolicy.from_config(
        load_config({"bf16": {"enabled": True}} | config)
    ).communicate


def test_devices_that_share_rows_reduce_gradients_in_a_dtype_of_their_own():
    key = "seq_parallel_communication_data_type"
    assert communicated() == communicated(**{key: "fp32"}) == torch.bfloat16
    for shared in ({"sequence_parallel_size": 2}, {"spmd": {"mesh": {"fsdp": -1, "sequence": 2}}}):
        assert communicated(**shared) == torch.float32
        assert communicated(**shared, communication_data_type="fp16") == torch.float32
        assert communicated(**shared, **{key: "fp16"}) == torch.float16
        assert communicated(**shared, **{key: None}) == torch.bfloat16


def without_effect(**config):
    return list(load_config(config).no_meaning)


def test_a_dtype_of_the_reduction_that_another_key_decides_is_said_to_have_no_effect():
    shared = {"sequence_parallel_size": 2}
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        own = {key: "fp32"}
        idle = [key] if key[0] == "s" else []
        assert (without_effect(**own), without_effect(**own, **shared)) == (
            idle,
            [] if idle else [key],
        )


def test_reduce_scatter_has_an_effect_where_it_orders_a_division_or_permits_one():
    def idle(stage, **more):
        zero = {"stage": stage, "reduce_scatter": False}
        return "zero_optimization.reduce_scatter" in without_effect(zero_optimization=zero, **more)

    fp16 = {"fp16": {"enabled": True}}
    assert [idle(stage) for stage in range(4)] == [True] * 4
    assert [idle(stage, **fp16) for stage in range(4)] == [True, False, False, True]
    assert idle(2, **fp16, gradient_allreduce_op="sum")
    assert not idle(2, prescale_gradients=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_gradients_are_divided_where_deepspeed_divides_them(stage):
    def factors(**zero):
        config = {"fp16": {"enabled": True}, "zero_optimization": {"stage": stage} | zero}
        found = GradientScaling.from_config(load_config(config), replicas=8)
        return found.before, found.after

    assert factors() == (1 / 8, 1)
    # Stage 3 divides first whatever the key says (zero/stage3.py, `__avg_scatter_*_grads`).
    assert factors(reduce_scatter=False) == ((1 / 8, 1) if stage == 3 else (1, 1 / 8))
