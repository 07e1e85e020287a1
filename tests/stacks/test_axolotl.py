"""`axolotl train` and `axolotl merge-lora` of axolotl 0.21 with its DeepSpeed configs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stacks.runs import Ended, FailedError, assert_merged, by_spmdzero, by_torch, logged

# Both sides compute in fp32 and sum in other orders.
CLOSE = 1e-4
STEPS = 6

# What deepspeed_configs/*.json have in common, without and with `bf16`.
SHARED = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ANY_DTYPE = {
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32,
        "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1,
    },
}  # fmt: skip
BF16 = {"bf16": {"enabled": True}}
ON_HOST = {"device": "cpu", "pin_memory": True}
Z3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "max_live_parameters": 0,
    "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True,
}  # fmt: skip
Z2 = {
    "stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True,
    "overlap_comm": True,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "zero1": {**ANY_DTYPE, "zero_optimization": {"stage": 1, "overlap_comm": True}},
    "zero2": {**ANY_DTYPE, "zero_optimization": Z2},
    "zero3": {**ANY_DTYPE, "zero_optimization": Z3},
    "zero3_bf16": {**BF16, "zero_optimization": Z3},
    "zero3_bf16_cpuoffload_all": {
        **BF16,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {**Z3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST},
    },
}

KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def rows_of(name: str, kind: str) -> list[dict[str, str]]:
    """The data set `name` of `material`, as a list of axolotl's `datasets`."""
    file = f"data/{name}/train.jsonl"
    return [{"path": file, "ds_type": "json", "split": "train", "type": kind}]


# As examples/llama-3/lora-1b.yml, with a model, lengths and steps of these tests, in fp32, and with
# an attention that has no kernel for GPUs.
RECIPE: dict[str, Any] = {
    "base_model": "model", "datasets": rows_of("alpaca", "alpaca"), "val_set_size": 0.25,
    "sequence_len": 64, "attn_implementation": "sdpa", "gradient_accumulation_steps": 2,
    # Two rows for two devices.
    "micro_batch_size": 2,
    "max_steps": STEPS, "learning_rate": 1e-3, "lr_scheduler": "cosine", "warmup_steps": 1,
    "bf16": False, "fp16": False, "tf32": False, "logging_steps": 1, "eval_steps": 3,
    "save_steps": 4, "weight_decay": 0.0, "seed": 7,
}  # fmt: skip
LORA = {
    "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0,
    "lora_target_linear": True,
}  # fmt: skip
PACKED = {"sample_packing": True, "eval_sample_packing": True, "sequence_len": 128}
# After an evaluation on a CPU, plain bitsandbytes goes on with weights that it has packed, in bf16.
NO_EVALUATION = {"val_set_size": None, "eval_steps": None}
# Preferences have no evaluation here.
RL = NO_EVALUATION
# Name of the row -> the config of deepspeed_configs/, and what differs from the recipe.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora zero1": ("zero1", LORA),
    "full zero2": ("zero2", {"gradient_checkpointing": True}),
    "full zero3": ("zero3", {"datasets": rows_of("chat", "chat_template")}),
    "packed lora zero2": ("zero2", {**LORA, **PACKED}),
    "packed full zero3": ("zero3", PACKED),
    "qlora zero3": ("zero3", {**LORA, **NO_EVALUATION, "adapter": "qlora", "load_in_4bit": True}),
    "8bit zero1": ("zero1", {"optimizer": "adamw_bnb_8bit"}),
    "completion zero2": ("zero2", {"datasets": rows_of("text", "completion")}),
    "dpo lora zero2": (
        "zero2",
        {**LORA, **RL, "rl": "dpo", "datasets": rows_of("preference", "chatml")},
    ),
    "dpo full zero3": ("zero3", {**RL, "rl": "dpo", "datasets": rows_of("preference", "chatml")}),
    "kto lora zero2": (
        "zero2",
        {
            **LORA, **RL, "rl": "kto", "datasets": rows_of("unpaired", "llama3.ultra"),
            "remove_unused_columns": False,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def folder(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run in, with ``model``, ``data`` and ``deepspeed_configs``."""
    made = tmp_path_factory.mktemp("runs")
    shutil.copytree(data, made / "data")
    shutil.copytree(model, made / "model")
    (made / "deepspeed_configs").mkdir()
    for name, told in CONFIGS.items():
        (made / "deepspeed_configs" / f"{name}.json").write_text(json.dumps(told | SHARED))
    return made


def recipe(folder: Path, name: str, told: dict[str, Any], zero: str | None = None) -> str:
    """Writes a config that trains into `folder` / `name`; without `zero` it names no DeepSpeed."""
    of = {**RECIPE, **told, "output_dir": name, "dataset_prepared_path": f"{name}-data"}
    if zero is not None:
        of["deepspeed"] = f"deepspeed_configs/{zero}.json"
    elif "adapter" in of:
        # axolotl turns them on, and they need a GPU.
        of |= dict.fromkeys(KERNELS, False)
    of = {key: value for key, value in of.items() if value is not None}
    (folder / f"{name}.yml").write_text(yaml.safe_dump(of))
    return f"{name}.yml"


def train(
    folder: Path, name: str, told: dict[str, Any], zero: str | None = None, *more: str
) -> Ended:
    """Runs `axolotl train` by spmdzero with that ZeRO config, or by plain torch."""
    words = ["axolotl", "train", recipe(folder, name, told, zero), *more]
    if zero is None:
        return by_torch([*words, "--launcher", "python"], cwd=folder, **QUIET)
    return by_spmdzero(words, cwd=folder, **QUIET)


QUIET = {"AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "offline"}


def close(wanted: Any) -> Any:
    """Equal to `wanted`, numbers or lists of them, within `CLOSE`."""
    return pytest.approx(wanted, rel=CLOSE, abs=CLOSE)


@pytest.mark.parametrize("row", ROWS)
def test_a_command_trains_as_by_plain_torch(row: str, folder: Path) -> None:
    zero, told = ROWS[row]
    name = row.replace(" ", "-")
    train(folder, f"{name}-plain", told)
    ended = train(folder, name, told, zero)
    measured = () if told.get("eval_steps", 3) is None else ("eval_loss", "tokens/trainable")
    for key in ("loss", "grad_norm", "learning_rate", *measured):
        mine, theirs = logged(folder / name, key), logged(folder / f"{name}-plain", key)
        assert theirs
        assert mine == close(theirs), key
        print(f"{row} {key}: {mine} beside {theirs}")
    assert len(logged(folder / name)) == STEPS
    assert f"ZeRO-{zero[4]}, fp32" in ended.said
    # axolotl keeps counts of its own in the model, and saves in mid run.
    assert "compiles its programs again" not in ended.said


def test_a_run_resumes_and_its_adapter_is_merged(folder: Path) -> None:
    from safetensors.torch import load_file

    train(folder, "whole", LORA, "zero3")
    resumed = {**LORA, "resume_from_checkpoint": "whole/checkpoint-4"}
    train(folder, "resumed", resumed, "zero3")
    # By its state a resumed run has the losses from the first step on.
    assert logged(folder / "resumed") == logged(folder / "whole")
    files = [folder / name / "adapter_model.safetensors" for name in ("whole", "resumed")]
    one, other = map(load_file, files)
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    by_spmdzero(["axolotl", "merge-lora", "whole.yml"], cwd=folder, **QUIET)
    assert_merged(folder / "model", folder / "whole", folder / "whole" / "merged")


@pytest.mark.parametrize("zero", ["zero2", "zero3_bf16", "zero3_bf16_cpuoffload_all"])
def test_its_examples_precision_is_bf16(zero: str, folder: Path) -> None:
    # As its examples have it: without a GPU axolotl itself would choose fp16.
    told = {"bf16": "auto", "fp16": None}
    ended = train(folder, f"auto-{zero}", told, zero)
    assert f"ZeRO-{zero[4]}, bf16" in ended.said
    assert "Training will fail" not in ended.said
    if not (folder / "fp32").exists():
        train(folder, "fp32", {})
    # bf16 has 8 bits.
    assert logged(folder / f"auto-{zero}") == pytest.approx(logged(folder / "fp32"), rel=2e-2)


def test_its_launchers_start_one_process_for_all_devices(folder: Path) -> None:
    # `accelerate launch`, its default, is that of all other tests here.
    told = {"max_steps": 1}
    torchrun = ["--launcher", "torchrun", "--", "--nproc_per_node", "2"]
    ended = train(folder, "launched", told, "zero2", *torchrun)
    assert "one is started, which drives all devices of its host" in ended.said
    train(folder, "in-process", told, "zero2", "--launcher", "python")
    assert logged(folder / "launched") == logged(folder / "in-process")


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"attn_implementation": "flash_attention_2"}, r"attn_implementation.*sdpa"),
        ({"attn_implementation": "flex_attention"}, r"attn_implementation.*sdpa"),
        ({**LORA, "lora_mlp_kernel": True}, "lora_mlp_kernel.*Leave it out"),
        ({"micro_batch_size": 1}, "per_device_train_batch_size.*Take 2"),
    ],
    ids=["flash", "flex", "kernels", "one row"],
)
def test_what_needs_a_gpu_is_refused_by_name(
    told: dict[str, Any], said: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id.replace(" ", "-")
    with pytest.raises(FailedError, match=said):
        train(folder, f"refused-{name}", told, "zero1")
