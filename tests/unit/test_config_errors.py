"""What a config is refused for, and what the error tells the user to do."""

import pytest

from spmdzero.config import load_config
from spmdzero.config._keys import REMOVED
from spmdzero.errors import SpmdZeroConfigError


def refused(config, **kwargs):
    with pytest.raises(SpmdZeroConfigError) as caught:
        load_config(config, **kwargs)
    return caught.value


def nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


# Unknown keys


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("gradient_cliping", "gradient_clipping"),
        ("Train_Batch_Size", "train_batch_size"),
        ("wall_clock_breakdwn", "wall_clock_breakdown"),
        ("zero_optimization.stge", "stage"),
        ("zero_optimization.offload_optimiser", "offload_optimizer"),
        ("bf16.enable", "enabled"),
        ("fp16.los_scale", "loss_scale"),
        ("spmd.forwrd", "forward"),
        ("data_types.grad_accumulation_dtype", "grad_accum_dtype"),
    ],
)
def test_a_misspelt_key_is_named_with_its_nearest_name(key, meant):
    error = refused(nested(key, 1))
    assert error.key == key
    assert error.fix == f"Did you mean {meant!r}?"


def test_a_misspelt_optimizer_parameter_is_named():
    error = refused({"optimizer": {"type": "SGD", "params": {"momentun": 0.9}}})
    assert (error.key, error.fix) == ("optimizer.params.momentun", "Did you mean 'momentum'?")


def test_a_misspelt_required_parameter_is_unknown_rather_than_missing():
    error = refused({"scheduler": {"type": "StepLR", "params": {"stepsize": 1}}})
    assert error.fix == "Did you mean 'step_size'?"


def test_adam_parameters_are_unknown_to_sgd():
    assert "momentum" in refused({"optimizer": {"type": "SGD", "params": {"betas": [0, 0]}}}).fix


def test_without_a_near_name_the_keys_of_the_section_are_listed():
    assert "check_grad_overflow, enabled" in refused({"bf16": {"xyzzy": 1}}).fix


def test_a_key_with_a_dot_belongs_to_the_level_it_stands_in():
    assert "the top level" in refused({"zero_optimization.xyzzy": 2}).reason


def test_a_key_that_is_not_a_string_is_refused():
    assert refused({"bf16": {1: True}}).key == "bf16"


# Types and ranges


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("train_batch_size", "8", "whole number"),
        ("train_batch_size", True, "whole number"),
        ("train_batch_size", 1.5, "whole number"),
        ("train_batch_size", 0, "greater than 0"),
        ("train_micro_batch_size_per_gpu", -1, "greater than 0"),
        ("gradient_accumulation_steps", 0, "greater than 0"),
        ("gradient_clipping", -0.5, "greater than or equal to 0"),
        ("gradient_clipping", float("nan"), "finite"),
        ("gradient_clipping", True, "a number"),
        ("bf16.enabled", "maybe", "true or false"),
        ("bf16.enabled", 2, "true or false"),
        ("bf16", True, "an object"),
        ("zero_optimization", [], "an object"),
        ("zero_optimization.stage", True, "whole number"),
        ("zero_optimization.reduce_bucket_size", "5e8", "whole number"),
        ("zero_optimization.overlap_comm", "abc", "true or false"),
        ("communication_data_type", "int8", "'fp32', 'fp16' or 'bf16'"),
        ("data_types.grad_accum_dtype", "float64", "'fp32', 'fp16' or 'bf16'"),
        ("spmd.mesh.fsdp", "all", "whole number"),
        ("spmd.outputs.loss", "max", "'batch', 'mean', 'sum', 'agree' or 'stack'"),
        ("spmd.min_shard_elements", -1, "greater than or equal to 0"),
    ],
)
def test_a_wrong_type_or_range_names_the_key_and_the_value(key, value, reason):
    error = refused(nested(key, value))
    assert error.key == key
    assert repr(error.value) == repr(value)  # NaN differs from itself, and True equals 1
    assert reason in error.reason


@pytest.mark.parametrize(
    ("params", "culprit"),
    [
        ({"lr": -1}, "lr"),
        ({"lr": "1e-3"}, "lr"),
        ({"betas": [0.9]}, "betas"),
        ({"betas": [0.9, 1.0]}, "betas"),
        ({"betas": 0.9}, "betas"),
        ({"betas": [False, 0.9]}, "betas"),
        ({"amsgrad": True}, "amsgrad"),
        ({"adam_w_mode": 2}, "adam_w_mode"),
    ],
)
def test_an_adam_parameter_is_checked(params, culprit):
    error = refused({"optimizer": {"type": "Adam", "params": params}})
    assert error.key == f"optimizer.params.{culprit}"


@pytest.mark.parametrize("value", [0.0, 1.0, None])
def test_max_grad_norm_points_to_gradient_clipping(value):
    error = refused({"optimizer": {"type": "SGD", "params": {"max_grad_norm": value}}})
    assert error.key == "optimizer.params.max_grad_norm"
    assert "gradient_clipping" in error.fix


@pytest.mark.parametrize(
    ("params", "culprit"),
    [
        ({"warmup_num_steps": 0, "total_num_steps": 9}, "warmup_num_steps"),
        ({"warmup_type": "cubic", "total_num_steps": 9}, "warmup_type"),
        ({"warmup_min_lr": [0.1, "x"], "total_num_steps": 9}, "warmup_min_lr"),
        ({"warmup_min_lr": float("inf"), "total_num_steps": 9}, "warmup_min_lr"),
        ({}, "total_num_steps"),
    ],
)
def test_a_schedule_parameter_is_checked(params, culprit):
    error = refused({"scheduler": {"type": "WarmupDecayLR", "params": params}})
    assert error.key == f"scheduler.params.{culprit}"


# Features that this release doesn't have


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("zero_optimization.stage", 3, "replicated"),
        ("zero_optimization.stage", 4, "no such"),
        ("zero_optimization.cpu_offload", True, "offload"),
        ("zero_optimization.offload_optimizer.device", "cpu", "offload"),
        ("zero_optimization.offload_param.device", "nvme", "offload"),
        ("zero_optimization.zero_quantized_gradients", True, "fp32, bf16 or fp16"),
        ("activation_checkpointing.cpu_checkpointing", True, "offload"),
        ("bf16.bf16_master_weights_and_grads", True, "offload"),
        ("bf16.bf16_optimizer_states", True, "need bf16 master weights"),
        ("fp16.fp16_master_weights_and_grads", True, "offload"),
        ("data_types.param_dtype", "fp16", "choose fp32"),
        ("compile.deepcompile", True, "XLA"),
        ("data_types.keep_in_fp32_modules", ["bias"], "no buffer is cast"),
        ("fp32_allreduce", True, "old key"),
        ("sequence_parallel_size", 2, "parallelism"),
    ],
)
def test_what_is_on_but_not_supported_is_refused_with_the_reason(key, value, reason):
    error = refused(nested(key, value))
    assert error.key == key
    assert repr(error.value) == repr(value)  # NaN differs from itself, and True equals 1
    assert reason in error.reason


def test_the_nearest_thing_to_stage_3_is_told():
    assert "stage 2" in refused({"zero_optimization": {"stage": 3}}).fix
    assert "FSDPv2" in refused({"zero_optimization": {"stage": 3}}).fix


@pytest.mark.parametrize("key", REMOVED)
def test_what_deepspeed_removed_is_refused_with_that_reason(key):
    error = refused(nested(key, {"enabled": True}))
    assert error.key == key
    assert "DeepSpeed removed" in error.reason


@pytest.mark.parametrize(
    ("name", "reason", "fix"),
    [
        ("OneBitAdam", "1-bit", "Use Adam"),
        ("zerooneadam", "1-bit", "Use Adam"),
        ("DeepSpeedCPUAdam", "never on the host", "without CPU"),
        ("MuAdamW", "mup package", "parameter group"),
        ("Adafactor", "rows and columns", "AdamW"),
        ("LBFGS", "several times in one step", "AdamW"),
        ("SparseAdam", "sparse gradients", "AdamW"),
        ("Foo", "no optimizer of this name", "Adam, AdamW, SGD"),
        ("Optimizer", "no optimizer of this name", "Adam, AdamW, SGD"),
        ("rmsprop", "no optimizer of this name", "a class of torch.optim"),
    ],
)
def test_an_unsupported_optimizer_is_refused_naming_those_that_work(name, reason, fix):
    error = refused({"optimizer": {"type": name}})
    assert reason in error.reason
    assert fix in error.fix


def test_per_head_muon_is_refused_and_may_be_off():
    muon = {"type": "Muon", "params": {"per_head_muon": False}}
    assert load_config({"optimizer": muon}).optimizer.params == muon["params"]
    error = refused({"optimizer": {"type": "Muon", "params": {"per_head_muon": True}}})
    assert error.key == "optimizer.params.per_head_muon"


def test_a_torch_optimizer_takes_the_arguments_of_its_class():
    rmsprop = {"type": "RMSprop", "params": {"lr": 0.1, "alpha": 0.9}}
    assert load_config({"optimizer": rmsprop}).optimizer.params == rmsprop["params"]
    error = refused({"optimizer": {"type": "RMSprop", "params": {"aplha": 0.9}}})
    assert error.key == "optimizer.params.aplha"
    assert "alpha" in error.fix


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Foo", "no schedule"), ("LRScheduler", "no schedule")],
)
def test_an_unsupported_schedule_is_refused(name, reason):
    assert reason in refused({"scheduler": {"type": name}}).reason


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_section_without_its_type_is_refused(section):
    error = refused({section: {"params": {}}})
    assert (error.key, error.reason) == (f"{section}.type", "this key is required")


# The spmd section


@pytest.mark.parametrize(
    "mesh", [{}, {"data": 2}, {"fsdp": 2, "model": 2}, {"fsdp": -1, "data": -1}, {"fsdp": 0}]
)
def test_a_mesh_that_has_no_meaning_is_refused_with_an_example(mesh):
    error = refused({"spmd": {"mesh": mesh}})
    assert error.key == "spmd.mesh"
    assert '{"fsdp": -1}' in error.fix


@pytest.mark.parametrize("batch_dim", [-1, True, "0", None, {"x": -1}, {"x": "0"}, [0]])
def test_a_batch_dim_is_a_dim_or_dims_by_name(batch_dim):
    assert refused({"spmd": {"batch_dim": batch_dim}}).key == "spmd.batch_dim"


def test_explicit_reduction_needs_the_region():
    error = refused({"spmd": {"forward": "global", "reduction": "explicit"}})
    assert (error.key, error.value) == ("spmd.reduction", "explicit")
