"""What a config is refused for, and what the error tells the user to do."""

from typing import Any

import pytest

from spmdzero.config import load_config
from spmdzero.config._keys import REMOVED
from tests.support.refusals import differing, nested, refused

pytestmark = pytest.mark.backends("any")


def at(rows: list[tuple[str, Any, str]]) -> list[tuple[Any, str, str]]:
    """Rows of key, value and words, as `differing` takes them."""
    return [(nested(key, value), key, words) for key, value, words in rows]


def optimizer(type_: str, **params: Any) -> Any:
    return {"optimizer": {"type": type_, "params": params}}


def scheduler(type_: str, **params: Any) -> Any:
    return {"scheduler": {"type": type_, "params": params}}


def test_a_misspelt_key_is_named_with_its_nearest_name():
    meant = {
        "zero_optimization.stge": "stage",
        "zero_optimization.offload_optimiser": "offload_optimizer",
        "bf16.enable": "enabled",
        "spmd.forwrd": "forward",
    }
    rows = [(key, 1, f"Did you mean {name!r}?") for key, name in meant.items()]
    rows += [
        ("bf16.xyzzy", 1, "The known keys are: bf16_master_weights_and_grads, bf16_optimizer_sta"),
    ]
    assert differing(at(rows)) == []
    assert refused({"zero_optimization": {"xyzzy": {"x": 2}}}).key == "zero_optimization.xyzzy"
    assert refused({"bf16": {1: True}}).key == "bf16"


def test_a_fault_in_an_entry_of_a_list_names_the_entry():
    home = "tensor_parallel.partition_config.layer_specs"
    row = {"patterns": [".*"]}
    rows = [
        ([{"optimizer": None}], "0.optimizer", None, "'optimizer'. The known keys are: "),
        ([row, row | {"partion_type": "row"}], "1.partion_type", "row", "mean 'partition_type'?"),
        ([row, row | {"shape": 3}], "1.shape", 3, "this is not a list"),
        ([row, 3], "1", 3, "an object"),
    ]
    for specs, place, value, message in rows:
        error = refused({"tensor_parallel": {"partition_config": {"layer_specs": specs}}})
        assert (error.key, error.value) == (f"{home}.{place}", value)
        assert message in str(error)


def test_a_wrong_type_or_range_names_the_key_and_the_value():
    rows = [
        ("train_batch_size", "8", "'8': this is not a whole number"),
        ("train_batch_size", True, "True: this is not a whole number"),
        ("train_batch_size", 1.5, "1.5: this is not a whole number"),
        ("train_batch_size", 0, "0: this is not greater than 0"),
        ("train_micro_batch_size_per_gpu", -1, "greater than 0"),
        ("gradient_clipping", -0.5, "greater than or equal to 0"),
        ("gradient_clipping", float("nan"), "nan: this is not a finite"),
        ("gradient_clipping", True, "a number"),
        ("gradient_predivide_factor", 0, "greater than 0"),
        ("gradient_allreduce_op", "max", "'mean' or 'sum'"),
        ("log_level", "loud", "'debug'"),
        ("managed_gradient_accumulation", 2, "true or false"),
        ("bf16.enabled", "maybe", "true or false"),
        ("bf16.enabled", 2, "true or false"),
        ("bf16", True, "an object"),
        ("zero_optimization", [], "an object"),
        ("zero_optimization.stage", True, "whole number"),
        ("zero_optimization.reduce_bucket_size", "5e8", "whole number"),
        ("communication_data_type", "int8", "'fp32', 'fp16' or 'bf16'"),
        ("spmd.mesh.fsdp", "all", "whole number"),
        ("spmd.outputs.loss", "max", "'batch', 'mean', 'sum', 'agree' or 'stack'"),
        ("spmd.min_shard_elements", -1, "greater than or equal to 0"),
        ("spmd.moments", "bfloat16", "an object"),
        ("spmd.moments.exp_avg", "int8", "'int8': an optimizer's state rests in fp32 or bf16"),
        ("spmd.moments.exp_avg", None, "rests in fp32 or bf16"),
        ("spmd.moments.exp_avg_sq", "float16", "in fp16 the square of a gradient below 1e-4 is 0"),
        ("fp16.loss_scale", -1, "greater than or equal to 0"),
        ("fp16.loss_scale", True, "a number"),
        ("fp16.loss_scale", float("inf"), "finite"),
        ("fp16.initial_scale_power", 128, "less than or equal to 127"),
        ("fp16.loss_scale_window", 1.5, "whole number"),
        ("fp16.hysteresis", 0, "greater than 0"),
    ]
    assert differing(at(rows)) == []


def test_what_is_on_but_not_supported_is_refused_with_the_reason():
    rows = [
        ("zero_optimization.stage", 4, "no such"),
        ("zero_optimization.offload_optimizer.device", "nvme", "offload to NVMe"),
        ("zero_optimization.offload_param.device", "NVMe", "offload to NVMe"),
        ("zero_optimization.offload_param.device", "gpu", "'none', 'cpu' or 'nvme'"),
        ("zero_optimization.offload_optimizer.ratio", 1.5, "less than or equal to 1"),
        ("zero_optimization.zenflow", {"topk_ratio": 0.1}, "later than others"),
        (
            "zero_optimization.zero_quantized_nontrainable_weights",
            True,
            '"zero_quantized_weights": true has them cross in int8',
        ),
        (
            "zero_optimization.mics_shard_size",
            8,
            '"spmd": {"mesh": {"data": 2, "fsdp": -1}} shards',
        ),
        ("bf16.bf16_master_weights_and_grads", True, "only DeepSpeedCPUAdam"),
        ("bf16.bf16_optimizer_states", True, "need bf16 master weights"),
        ("fp16.fp16_master_weights_and_grads", True, "only DeepSpeedCPUAdam"),
        ("data_types.param_dtype", "fp16", "choose fp32"),
        ("data_types.keep_in_fp32_modules", "bias", 'neither "auto" nor a list'),
        ("spmd.mesh", {}, '{"fsdp": -1}'),
        ("spmd.mesh", {"fsdp": 2, "model": 2}, "the mesh axes are"),
        ("spmd.mesh", {"fsdp": -1, "data": -1}, "only one axis"),
        ("spmd.mesh", {"fsdp": 0}, "1 device or more"),
        *(("spmd.batch_dim", dim, "dim") for dim in (-1, True, "0", None, {"x": -1}, [0])),
        *((key, {"enabled": True}, "DeepSpeed removed") for key in REMOVED),
    ]
    assert differing(at(rows)) == []
    explicit = {"spmd": {"forward": "global", "reduction": "explicit"}}
    outputs = {"spmd": {"forward": "global", "outputs": {"0": "mean"}}}
    assert differing([(explicit, "spmd.reduction", "region")]) == []
    assert differing([(outputs, "spmd.outputs", "region")]) == []


def test_an_optimizer_that_does_not_run_says_which_do():
    rows = {
        "OneBitAdam": "1-bit optimizers compress messages",
        "zerooneadam": "Use Adam",
        "DeepSpeedCPUAdam": "by the name without DeepSpeedCPU. Write",
        "MuAdamW": "mup package",
        "FusedAdam": 'Write "AdamW"',
        "fusedlamb": "the compiler fuses",
        "Adafactr": "Use one of Adam",
        "LBFGS": "several times in one step",
        "SparseAdam": "sparse gradients",
        "Foo": "no optimizer of this name. Use one of Adam, AdamW, SGD",
        "Optimizer": "or a class of torch.optim",
        "Adamw2": "Did you mean 'AdamW'? Use one of",
        "rmsprop": "Did you mean 'RMSprop'?",
    }
    assert differing([(optimizer(n), "optimizer.type", words) for n, words in rows.items()]) == []
    assert refused({"optimizer": {"params": {}}}).reason == "this key is required"


def test_a_parameter_of_an_optimizer_is_checked():
    rows = [
        ("Adam", {"lr": -1}, "lr", "greater than or equal to 0"),
        ("Adam", {"lr": "1e-3"}, "lr", "this is not a number"),
        ("Adam", {"lr": float("nan")}, "lr", "finite"),
        ("Adam", {"betas": [0.9]}, "betas", "two numbers"),
        ("Adam", {"betas": [0.9, 1.0]}, "betas", "below 1"),
        ("Adam", {"betas": 0.9}, "betas", "two numbers"),
        ("Adam", {"betas": [False, 0.9]}, "betas", "two numbers"),
        ("Adam", {"amsgrad": True}, "amsgrad", "Write false"),
        ("Adam", {"adam_w_mode": 2}, "adam_w_mode", "true or false"),
        ("Adam", {"weigth_decay": 0.1}, "weigth_decay", "'weight_decay'"),
        ("Adam", {"torch_adam": True, "bias_correction": False}, "bias_correction", "torch_adam"),
        ("Adagrad", {"lr_deacy": 0.1}, "lr_deacy", "'lr_decay'"),
        ("Adagrad", {"initial_accumulator_value": -1.0}, "initial_accumulator_value", "to 0"),
        ("Lion", {"eps": 1e-8}, "eps", "betas"),
        ("Lamb", {"amsgrad": True}, "amsgrad", "has no key"),
        ("SGD", {"momentun": 0.9}, "momentun", "Did you mean 'momentum'?"),
        ("SGD", {"betas": [0, 0]}, "betas", "momentum"),
        ("SGD", {"maximize": True}, "maximize", "has no key"),
        ("SGD", {"nesterov": True}, "nesterov", "momentum above 0"),
        ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening", "to 0"),
        ("RMSprop", {"aplha": 0.9}, "aplha", "'alpha'"),
        *(
            (name, {"max_grad_norm": value}, "max_grad_norm", "gradient_clipping")
            for name, value in (("SGD", 0.0), ("Adam", 1.0), ("Lamb", None))
        ),
    ]
    found = [
        (optimizer(name, **params), f"optimizer.params.{key}", words)
        for name, params, key, words in rows
    ]
    assert differing(found) == []
    for accepted in (
        optimizer("Muon", per_head_muon=True),
        optimizer("RMSprop", lr=0.1, alpha=0.9),
    ):
        params = accepted["optimizer"]["params"]
        assert load_config(accepted).optimizer.params == params


def test_a_schedule_and_its_parameters_are_checked():
    cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    rows = [
        ("WarmupDecayLR", {"warmup_num_steps": 0, "total_num_steps": 9}, "warmup_num_steps", "n 0"),
        ("WarmupDecayLR", {"warmup_min_lr": [0.1, "x"], "total_num_steps": 9}, "warmup_min_lr", ""),
        ("WarmupLR", {"warmup_min_lr": float("inf")}, "warmup_min_lr", "not a number from 0"),
        ("WarmupLR", {"warmup_max": 1.0}, "warmup_max", "'warmup_max_lr'"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps", "whole number"),
        ("WarmupDecayLR", {}, "total_num_steps", "Add it to scheduler.params"),
        ("WarmupCosineLR", {"total_num_steps": "9"}, "total_num_steps", "a number"),
        ("OneCycle", {}, "cycle_min_lr", "this key is required"),
        ("OneCycle", cycle | {"cycle_first_step_size": 0}, "cycle_first_step_size", "than 0"),
        ("OneCycle", cycle | {"cycle_second_step_size": -1}, "cycle_second_step_size", "to 0"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size", "than 0"),
        ("LRRangeTest", {"lr_range_test_min_lr": "1"}, "lr_range_test_min_lr", "number"),
        ("StepLR", {"stepsize": 1}, "stepsize", "Did you mean 'step_size'?"),
        ("StepLR", {}, "step_size", "this key is required"),
    ]
    found = [
        (scheduler(name, **params), f"scheduler.params.{key}", words)
        for name, params, key, words in rows
    ]
    types = {
        "Foo": "no schedule",
        "LRScheduler": "no schedule",
        "WarmupCosinLR": "Did you mean 'WarmupCosineLR'?",
        "warmuplr": "Did you mean 'WarmupLR'?",
        "CosineAnnealing": "Did you mean 'CosineAnnealingLR'?",
    }
    found += [(scheduler(name), "scheduler.type", words) for name, words in types.items()]
    assert differing([*found, ({"scheduler": {}}, "scheduler.type", "required")]) == []
