"""`llamafactory-cli` of LLaMA-Factory 0.9.5 with its example configs, beside plain torch."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stacks.runs import Ended, FailedError, by_spmdzero, by_torch, logged

# Both sides compute in fp32 and sum in other orders.
CLOSE = 1e-4
STEPS = 6

# What examples/deepspeed/*.json have in common.
SHARED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
        "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
}  # fmt: skip
BUCKETS = {
    "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False,
    "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True,
    "round_robin_gradients": True,
}  # fmt: skip
Z3 = {
    "stage": 3, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
ON_HOST = {
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "cpu", "pin_memory": True},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "z0": {"zero_optimization": {"stage": 0, **BUCKETS}},
    "z2": {"zero_optimization": {"stage": 2, **BUCKETS}},
    "z3": {"zero_optimization": Z3},
    "z3_offload": {"zero_optimization": {**ON_HOST, **Z3}},
    "z2_autotp": {
        "zero_optimization": {"stage": 2, **BUCKETS},
        "tensor_parallel": {"autotp_size": 2},
    },
}

# What the data sets of `material` are to LLaMA-Factory.
DATA = {
    "text": {"columns": {"prompt": "text"}},
    "alpaca": {},
    "preference": {
        "ranking": True,
        "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    },
    "unpaired": {
        "columns": {"prompt": "prompt", "response": "completion", "kto_tag": "label"},
    },
}
# As examples/train_lora/qwen3_lora_sft_ds3.yaml, with a model, lengths and steps of these tests.
RECIPE: dict[str, Any] = {
    "model_name_or_path": "model", "trust_remote_code": True, "dataset_dir": "data",
    "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 8,
    "lora_target": "all",
    "dataset": "alpaca", "template": "default", "cutoff_len": 64, "max_samples": 1000,
    "preprocessing_num_workers": 2, "dataloader_num_workers": 2, "overwrite_cache": True,
    "logging_steps": 1, "save_steps": 4, "plot_loss": True, "save_only_model": False,
    "report_to": "none",
    # Two rows for two devices; the examples have one, which a process of one GPU takes.
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3, "max_steps": STEPS, "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1, "ddp_timeout": 180000000, "seed": 7,
}  # fmt: skip
FULL = {"finetuning_type": "full"}
EVALUATED = {
    "val_size": 0.2, "per_device_eval_batch_size": 4, "eval_strategy": "steps", "eval_steps": 3,
}  # fmt: skip
OF_PAIRS = {"dataset": "preference"}
# Name of the row -> the file of examples/deepspeed/, and what differs from the recipe.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft lora z0": ("z0", {}),
    "sft lora z2": ("z2", {**EVALUATED, "compute_accuracy": True}),
    "sft lora z3": ("z3", EVALUATED),
    "sft lora z3_offload": ("z3_offload", {}),
    "sft lora z2_autotp": ("z2_autotp", {}),
    "sft full z2": ("z2", FULL),
    "sft full z3": ("z3", {**FULL, **EVALUATED}),
    "sft qlora z2": ("z2", {"quantization_bit": 4}),
    "sft qlora z3": ("z3", {"quantization_bit": 4}),
    "sft adamw_8bit z2": ("z2", {**FULL, "optim": "adamw_8bit"}),
    "sft adafactor z3": ("z3", {**FULL, "optim": "adafactor"}),
    "sft freeze z2": ("z2", {"finetuning_type": "freeze", "freeze_trainable_layers": 1}),
    "sft packing z2": ("z2", {"packing": True}),
    "sft neat_packing z3": ("z3", {**FULL, "neat_packing": True}),
    "sft new tokens z3": ("z3", {**FULL, "add_tokens": "<a>,<b>"}),
    "pt lora z2": ("z2", {"stage": "pt", "dataset": "text"}),
    "dpo lora z2": ("z2", {"stage": "dpo", **OF_PAIRS}),
    "dpo full z3": ("z3", {"stage": "dpo", **OF_PAIRS, **FULL}),
    "orpo lora z2": ("z2", {"stage": "dpo", "pref_loss": "orpo", **OF_PAIRS}),
    "kto lora z2": ("z2", {"stage": "kto", "dataset": "unpaired"}),
    "kto full z3": ("z3", {"stage": "kto", "dataset": "unpaired", **FULL}),
    "rm lora z2": ("z2", {"stage": "rm", **OF_PAIRS, **EVALUATED}),
    "rm full z3": ("z3", {"stage": "rm", **OF_PAIRS, **FULL}),
}
# What each stage logs of its own. Differences of log probabilities of 60 or so, of which fp32 has
# 4e-6, make rewards; how many are positive is rounding's at first, where both models are one.
MEASURED = {
    "dpo": ("rewards/chosen", "rewards/margins", "logps/chosen"),
    "kto": ("rewards/chosen", "rewards/rejected", "logps/chosen", "kl"),
}


@pytest.fixture(scope="session")
def folder(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run in, with ``model``, ``data`` and the configs."""
    made = tmp_path_factory.mktemp("runs")
    shutil.copytree(data, made / "data")
    shutil.copytree(model, made / "model")
    config = json.loads((made / "model" / "config.json").read_text())
    # TRL's reward head drops a tenth of its inputs, and devices draw other ones.
    config["summary_dropout_prob"] = 0.0
    (made / "model" / "config.json").write_text(json.dumps(config))
    info = {name: {"file_name": f"{name}/train.jsonl", **told} for name, told in DATA.items()}
    (made / "data" / "dataset_info.json").write_text(json.dumps(info))
    for name, told in CONFIGS.items():
        (made / f"ds_{name}_config.json").write_text(json.dumps(SHARED | told))
    return made


def recipe(folder: Path, name: str, told: dict[str, Any], zero: str | None = None) -> list[str]:
    """The command that trains into `folder` / `name`; without `zero` it names no DeepSpeed."""
    of = {**RECIPE, **told}
    if of["stage"] == "pt":
        del of["template"]
    if zero is not None:
        of["deepspeed"] = f"ds_{zero}_config.json"
    of["output_dir"] = name
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(of))
    return ["llamafactory-cli", "train", f"{name}.yaml"]


def train(
    folder: Path, name: str, told: dict[str, Any], zero: str | None = None, **variables: str
) -> Ended:
    """Trains by spmdzero with that ZeRO config, or by plain torch."""
    words = recipe(folder, name, told, zero)
    if zero is None:
        return by_torch(words, cwd=folder, **variables)
    return by_spmdzero(words, cwd=folder, **variables)


def close(wanted: Any) -> Any:
    """Equal to `wanted`, numbers or lists of them, within `CLOSE`."""
    return pytest.approx(wanted, rel=CLOSE, abs=CLOSE)


@pytest.mark.parametrize("row", ROWS)
def test_a_stage_trains_as_by_plain_torch(row: str, folder: Path) -> None:
    zero, told = ROWS[row]
    name = row.replace(" ", "-")
    train(folder, f"{name}-plain", told)
    ended = train(folder, name, told, zero)
    measured = MEASURED.get(told.get("stage", "sft"), ())
    if "eval_strategy" in told:
        measured += ("eval_loss",)
    for key in ("loss", "grad_norm", "learning_rate", *measured):
        mine, theirs = logged(folder / name, key), logged(folder / f"{name}-plain", key)
        assert mine == close(theirs), key
        print(f"{row} {key}: {mine} beside {theirs}")
    assert len(logged(folder / name)) == STEPS
    # A save in mid run leaves what was compiled.
    assert "compiles its programs again" not in ended.said


def test_a_run_resumes_and_exports(folder: Path) -> None:
    from safetensors.torch import load_file

    train(folder, "whole", {}, "z3")
    resumed = {"resume_from_checkpoint": "whole/checkpoint-4"}
    train(folder, "resumed", resumed, "z3")
    # By its state a resumed run has the losses from the first step on.
    assert logged(folder / "resumed") == logged(folder / "whole")
    files = [folder / name / "adapter_model.safetensors" for name in ("whole", "resumed")]
    one, other = map(load_file, files)
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    merged = {
        "model_name_or_path": "model", "adapter_name_or_path": "whole", "template": "default",
        "trust_remote_code": True, "export_dir": "merged", "export_device": "cpu",
        "infer_dtype": "float32",
    }  # fmt: skip
    (folder / "merge.yaml").write_text(yaml.safe_dump(merged))
    by_spmdzero(["llamafactory-cli", "export", "merge.yaml"], cwd=folder)
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(folder / "merged" / "model.safetensors")
    assert after.keys() == before.keys()
    changed = [name for name in after if not after[name].equal(before[name])]
    assert changed
    assert all("proj" in name for name in changed)
    # The merged model begins where the adapter ended.
    merged_loss = _first_loss(folder, "from-merged", {"model_name_or_path": "merged"})
    adapted = {"adapter_name_or_path": "whole"}
    assert merged_loss == close(_first_loss(folder, "from-adapter", adapted))


def _first_loss(folder: Path, name: str, told: dict[str, Any]) -> float:
    train(folder, name, {**told, "max_steps": 1})
    return logged(folder / name)[0]


def test_its_own_launcher_starts_one_process_for_all_devices(folder: Path) -> None:
    # What its README has for one GPU, and what its launcher does by itself for several.
    ended = train(folder, "launched", {"max_steps": 2}, "z2", FORCE_TORCHRUN="1")
    assert "one is started, which drives all devices of its host" in ended.said
    train(folder, "launched-plain", {"max_steps": 2})
    assert logged(folder / "launched") == close(logged(folder / "launched-plain"))


def test_rows_that_the_devices_cant_share_are_refused_by_name(folder: Path) -> None:
    # The examples have one row, which under DeepSpeed is that of each GPU.
    words = recipe(folder, "refused", {"per_device_train_batch_size": 1}, "z2")
    with pytest.raises(FailedError, match=r"per_device_train_batch_size.*Take 2"):
        by_spmdzero(words, cwd=folder)


def test_a_recipe_without_deepspeed_says_that_it_trains_by_plain_torch(folder: Path) -> None:
    words = recipe(folder, "without", {"max_steps": 1})
    assert "trains by plain torch" in by_spmdzero(words, cwd=folder).said


def test_bf16_trains_with_its_own_examples_precision(folder: Path) -> None:
    train(folder, "half", {**FULL, "bf16": True}, "z3")
    train(folder, "half-fp32", FULL)
    # bf16 has 8 bits.
    assert logged(folder / "half") == pytest.approx(logged(folder / "half-fp32"), rel=2e-2)


def test_fp8_is_the_configs_products(folder: Path) -> None:
    ended = train(folder, "fp8", {**FULL, "bf16": True, "fp8": True}, "z3")
    assert "in fp8" in ended.said
    train(folder, "fp8-fp32", FULL)
    found, plain = logged(folder / "fp8"), logged(folder / "fp8-fp32")
    assert found == pytest.approx(plain, rel=3e-2)
    assert found != logged(folder / "half") if (folder / "half").exists() else True
