"""TRL's commands with its accelerate configs, beside the same commands by plain torch."""

from pathlib import Path

import pytest

from tests.stacks.runs import by_spmdzero, by_torch, logged

STEPS = 6
USUAL = [
    "--per_device_train_batch_size", "8", "--max_steps", str(STEPS), "--learning_rate", "1e-2",
    "--logging_steps", "1", "--report_to", "none", "--bf16", "false", "--seed", "1",
    "--max_length", "64",
]  # fmt: skip
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
    "dpo": ["dpo", "--dataset_name", "{data}/preference"],
    "kto": ["kto", "--dataset_name", "{data}/unpaired"],
    "reward": ["reward", "--dataset_name", "{data}/preference"],
}  # fmt: skip


def command(name: str, model: Path, data: Path, folder: Path, *more: str) -> list[str]:
    words = [word.format(data=data) for word in COMMANDS[name]]
    where = ["--model_name_or_path", str(model), "--output_dir", str(folder)]
    return ["trl", *words, *where, *USUAL, *more]


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
