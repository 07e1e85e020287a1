"""TRL's commands with its accelerate configs, beside the same commands by plain torch."""

from pathlib import Path

import pytest

from tests.stacks import material
from tests.stacks.runs import by_spmdzero, by_torch, logged

STEPS = 6
USUAL = [
    "--per_device_train_batch_size", "8", "--max_steps", str(STEPS), "--learning_rate", "1e-2",
    "--logging_steps", "1", "--report_to", "none", "--bf16", "false", "--seed", "1",
]  # fmt: skip
SHORT = ["--max_length", "64"]
COMMANDS = {
    "sft": ["sft", "--dataset_name", "{data}/text"],
    "sft of messages": ["sft", "--dataset_name", "{data}/chat", "--assistant_only_loss", "false"],
    "sft by LoRA": [
        "sft", "--dataset_name", "{data}/text", "--use_peft", "--lora_target_modules", "all-linear",
        "--lora_dropout", "0.0",
    ],
    "sft packed": [
        "sft", "--dataset_name", "{data}/text", "--packing", "--packing_strategy", "wrapped",
    ],
    "sft packed by text": [
        "sft", "--dataset_name", "{data}/text", "--packing", "--packing_strategy", "bfd",
    ],
    "sft without padding": [
        "sft", "--dataset_name", "{data}/text", "--padding_free", "--max_length", "None",
    ],
    "dpo": ["dpo", "--dataset_name", "{data}/preference"],
    "kto": ["kto", "--dataset_name", "{data}/unpaired"],
    "reward": ["reward", "--dataset_name", "{data}/preference"],
}  # fmt: skip
_ONLINE = [
    "--dataset_name", "{data}/preference", "--reward_funcs", "rewards.counting", "--beta", "0.04",
    "--num_generations", "4", "--max_completion_length", "16", "--pad_to_multiple_of", "32",
    # AdamW makes a step of the rate's size of a gradient that is rounding alone, here of 1e-9.
    "--adam_epsilon", "1e-5",
]  # fmt: skip
ONLINE = {
    "grpo": ["grpo", *_ONLINE],
    "grpo by LoRA, twice": [
        "grpo", *_ONLINE, "--use_peft", "--lora_target_modules", "all-linear",
        "--lora_dropout", "0.0", "--loss_type", "grpo", "--num_iterations", "2",
        "--gradient_accumulation_steps", "2", "--eval_strategy", "steps", "--eval_steps", "3",
    ],
    "rloo, twice": ["rloo", *_ONLINE, "--num_iterations", "2", "--learning_rate", "1e-3"],
    "grpo by a model of rewards": [
        "grpo", *_ONLINE, "--reward_funcs", "rewards.counting",
        "--reward_model_name_or_path", "{data}/judge",
    ],
}  # fmt: skip
REWARDS = """
def counting(completions, **kwargs):
    found = []
    for words in map(str.split, completions):
        numbers = [int(word[1:]) for word in words if word[0] == "w"]
        pairs = list(zip(numbers, numbers[1:]))
        found.append(sum(after > before for before, after in pairs) / max(1, len(pairs)))
    return found
"""


def command(name: str, model: Path, data: Path, folder: Path, *more: str) -> list[str]:
    first, *words = (word.format(data=data) for word in (COMMANDS | ONLINE)[name])
    where = ["--model_name_or_path", str(model), "--output_dir", str(folder)]
    return ["trl", first, *where, *USUAL, *(SHORT if name in COMMANDS else []), *words, *more]


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_losses_of_plain_torch(
    name: str, stage: str, model: Path, data: Path, tmp_path: Path
) -> None:
    # Their configs say bf16 and eight processes.
    ours = ["--accelerate_config", stage, "--mixed_precision", "no"]
    ended = by_spmdzero(command(name, model, data, tmp_path / "ours", *ours), cwd=tmp_path)
    by_torch(command(name, model, data, tmp_path / "plain"), cwd=tmp_path)
    losses, plain = logged(tmp_path / "ours"), logged(tmp_path / "plain")
    assert len(plain) == STEPS
    print(
        f"\n{name}, {stage}:",
        *(f"{one:.4f} ({other:.4f})" for one, other in zip(losses, plain, strict=True)),
    )
    # fp32: sums in another order, through six steps of a large learning rate.
    assert losses == pytest.approx(plain, rel=1e-4)
    assert f"ZeRO-{stage[-1]}" in ended.said
    assert (tmp_path / "ours" / "config.json").exists() or "LoRA" in name


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@pytest.mark.parametrize("name", ONLINE)
def test_a_command_that_generates_has_the_numbers_of_plain_torch(
    name: str, stage: str, model: Path, data: Path, tmp_path: Path
) -> None:
    """Both draw texts by torch's generator on the CPU, of the same seed: they are the same texts.

    `rloo`'s losses, and some of `grpo`'s, are sums of advantages, which are 0 but for rounding as
    long as the model is the one that has drawn; a second step on each draw has others.
    """
    (tmp_path / "rewards.py").write_text(REWARDS)
    if not (data / "judge").exists():
        material.write_judge(data / "judge", model)
    ours = ["--accelerate_config", stage, "--mixed_precision", "no"]
    ended = by_spmdzero(command(name, model, data, tmp_path / "ours", *ours), cwd=tmp_path)
    by_torch(command(name, model, data, tmp_path / "plain"), cwd=tmp_path)
    evaluates = "--eval_steps" in ONLINE[name]
    for key in ("loss", "grad_norm", "kl", "reward", "entropy", *["eval_loss"] * evaluates):
        found, wanted = logged(tmp_path / "ours", key), logged(tmp_path / "plain", key)
        pairs = zip(found, wanted, strict=True)
        print(f"\n{name}, {stage}, {key}:", *(f"{a:.6f} ({b:.6f})" for a, b in pairs))
        # fp32 as above; log-probabilities of sums of 5 or so.
        assert found == pytest.approx(wanted, rel=1e-4, abs=2e-6), key
        assert len(wanted) > 1
    assert f"ZeRO-{stage[-1]}" in ended.said


def test_distillation_is_refused_by_name_before_its_first_step(
    model: Path, data: Path, tmp_path: Path
) -> None:
    words = [
        "trl", "distillation", "--accelerate_config", "zero2", "--mixed_precision", "no",
        "--model_name_or_path", str(model), "--teacher_model_name_or_path", str(model),
        "--dataset_name", f"{data}/preference", "--output_dir", str(tmp_path / "ours"), *USUAL,
    ]  # fmt: skip
    said = by_spmdzero(words, cwd=tmp_path, status=1).said
    assert "trl distillation (DistillationTrainer) computes its loss in the place of" in said
    assert "trl sft" in said


def test_sft_evaluates_saves_resumes_and_leaves_a_model_of_transformers(
    model: Path, data: Path, tmp_path: Path
) -> None:
    more = ["--save_steps", "3", "--eval_strategy", "steps", "--eval_steps", "3"]
    ours = ["--accelerate_config", "zero3", "--mixed_precision", "no", *more]
    straight, again = tmp_path / "straight", tmp_path / "again"
    by_spmdzero(command("sft", model, data, straight, *ours), cwd=tmp_path)
    by_torch(command("sft", model, data, tmp_path / "plain", *more), cwd=tmp_path)
    # fp32, as above.
    evaluated = logged(tmp_path / "plain", "eval_loss")
    assert len(evaluated) == 2
    assert logged(straight, "eval_loss") == pytest.approx(evaluated, rel=1e-4)

    resumed = ["--resume_from_checkpoint", str(straight / "checkpoint-3")]
    by_spmdzero(command("sft", model, data, again, *ours, *resumed), cwd=tmp_path)
    assert logged(again) == logged(straight)

    import torch
    from transformers import AutoModelForCausalLM

    found, plain = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (straight, tmp_path / "plain")
    )
    assert found.keys() == plain.keys()
    for name, tensor in found.items():
        # AdamW's steps are of the learning rate's size, whatever the gradient's rounding is.
        torch.testing.assert_close(tensor, plain[name], rtol=0, atol=1e-4, msg=name)
