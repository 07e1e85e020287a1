"""What a config file turns into."""

import copy
import json

import pydantic
import pytest
import torch

from spmdzero.config import SpmdZeroConfig, load_config
from spmdzero.errors import SpmdZeroConfigError

pytestmark = pytest.mark.backends("any")

# A file as DeepSpeed's tutorials write them, with switched-off features and communication knobs.
TYPICAL = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 100,
    "gradient_clipping": 0.5,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 10, "total_num_steps": 100},
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "cpu_offload": False,
    },
    "tensorboard": {"enabled": False, "output_path": "logs"},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
}


def write(tmp_path, text):
    path = tmp_path / "ds_config.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_typical_deepspeed_file_loads_with_its_values(tmp_path):
    config = load_config(write(tmp_path, json.dumps(TYPICAL)))
    assert config.train_batch_size == 32
    assert config.gradient_clipping == 0.5
    assert config.zero_optimization.stage == 2
    assert config.zero_optimization.reduce_bucket_size == 200_000_000
    assert config.bf16.enabled
    assert config.optimizer.params == TYPICAL["optimizer"]["params"]
    assert config.scheduler.type == "WarmupDecayLR"


def test_defaults_of_the_spmd_section():
    spmd = load_config({}).spmd
    assert spmd.mesh == {"fsdp": -1}
    assert (spmd.forward, spmd.reduction, spmd.batch_dim) == ("region", "auto", 0)
    assert (spmd.outputs, spmd.min_shard_elements, spmd.check_finite) == ({}, 2048, False)


def test_the_spmd_section_is_read():
    spmd = load_config(
        {
            "spmd": {
                "mesh": {"fsdp": -1, "data": 2},
                "forward": "region",
                "reduction": "explicit",
                "batch_dim": {"hidden": 1},
                "outputs": {"attentions.0": "stack"},
                "moments": {"exp_avg": "bfloat16", "mean": "FP32", "v": "torch.bfloat16"},
                "min_shard_elements": 1e4,
                "check_finite": True,
            }
        }
    ).spmd
    assert list(spmd.mesh.items()) == [("data", 2), ("fsdp", -1)]
    assert (spmd.forward, spmd.reduction) == ("region", "explicit")
    assert spmd.batch_dim == {"hidden": 1}
    assert spmd.outputs == {"attentions.0": "stack"}
    assert spmd.moments == {"exp_avg": "bf16", "mean": "fp32", "v": "bf16"}
    assert spmd.min_shard_elements == 10_000
    assert spmd.check_finite


def test_the_given_dict_is_neither_changed_nor_shared():
    given = copy.deepcopy(TYPICAL)
    config = load_config(given)
    config.optimizer.params["lr"] = 0.0
    assert given == TYPICAL
    assert config.source == TYPICAL
    given["optimizer"]["params"]["lr"] = 1.0
    assert config.source == TYPICAL


def test_a_config_is_frozen():
    config = load_config(TYPICAL)
    with pytest.raises(pydantic.ValidationError):
        config.train_batch_size = 1
    with pytest.raises(pydantic.ValidationError):
        config.zero_optimization.stage = 1


def test_keys_without_meaning_are_reported_only_when_given():
    assert load_config({}).no_meaning == {}
    assert set(load_config(TYPICAL).no_meaning) == {
        "zero_optimization.allgather_partitions",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.reduce_scatter",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.overlap_comm",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.offload_optimizer.pin_memory",
        "activation_checkpointing.number_checkpoints",
        "activation_checkpointing.partition_activations",
    }


def test_torch_adam_has_a_meaning():
    adam = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    assert load_config(adam).no_meaning == {}


def test_optimizer_names_are_read_in_any_case():
    for given, canonical in (
        ("adam", "Adam"),
        ("ADAMW", "AdamW"),
        ("sgd", "SGD"),
        ("mUoN", "Muon"),
    ):
        assert load_config({"optimizer": {"type": given}}).optimizer.type == canonical


def test_missing_or_null_parameters_are_no_parameters():
    assert load_config({"optimizer": {"type": "SGD"}}).optimizer.params == {}
    assert load_config({"optimizer": {"type": "SGD", "params": None}}).optimizer.params == {}


def test_parameter_names_of_every_torch_schedule_are_known():
    base = torch.optim.lr_scheduler.LRScheduler
    names = [
        name
        for name, found in vars(torch.optim.lr_scheduler).items()
        if isinstance(found, type)
        and issubclass(found, base)
        and found is not base
        and name[0] != "_"
    ]
    assert len(names) > 10
    for name in names:
        with pytest.raises(SpmdZeroConfigError, match="has no key 'no_such_parameter'"):
            load_config({"scheduler": {"type": name, "params": {"no_such_parameter": 1}}})


def test_a_torch_schedule_is_accepted_with_its_parameters():
    schedule = {"type": "StepLR", "params": {"step_size": 3, "gamma": 0.5}}
    assert load_config({"scheduler": schedule}).scheduler.params == schedule["params"]


def test_infinite_steps_per_print_means_never():
    assert load_config({"steps_per_print": float("inf")}).steps_per_print is None


OFF = [
    {"zero_optimization": {"offload_param": {"device": "none"}}},
    {"zero_optimization": {"offload_param": {}}},
    {"fp16": {}},
    {"amp": {"enabled": False, "opt_level": "O1"}},
    {"torch_autocast": {"enabled": False, "dtype": "bfloat16"}},
    {"gradient_predivide_factor": 1},
    {"flops_profiler": {"enabled": False, "profile_step": 5}},
    {"comms_logger": {}},
    {"aio": {"queue_depth": 8}},
    {"checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}}},
    {"timers": {"throughput": {"enabled": False, "synchronized": True}}},
    {"bf16": {"enabled": True, "bf16_optimizer_states": False}},
    {"data_types": {"param_dtype": None}},
    {"optimizer": {"type": "Adam", "legacy_fusion": False}},
]


def test_what_is_present_but_off_is_accepted():
    for given in OFF:
        assert isinstance(load_config(given), SpmdZeroConfig)
