"""Runs peft's examples with their DeepSpeed configs, beside plain torch."""

import re
from pathlib import Path

import pytest

from tests.stacks import material, peft_material, runs
from tests.suites import sources

SFT = (
    "sft/train.py --seed 100 --model_name_or_path model --splits train,test --max_length 64 "
    "--num_train_epochs 3 --logging_steps 1 --eval_strategy epoch --save_strategy epoch "
    "--learning_rate 1e-2 --lr_scheduler_type cosine --weight_decay 1e-4 --max_grad_norm 1.0 "
    "--per_device_train_batch_size 8 --per_device_eval_batch_size 8 "
    "--gradient_accumulation_steps 4 --gradient_checkpointing True --use_reentrant False "
    "--use_peft_lora True --lora_r 8 --lora_alpha 16 --lora_dropout 0 --report_to none "
    "--lora_target_modules all-linear --use_4bit_quantization False --bf16 False"
)
DATA = {
    "text": "--dataset_name data/text --chat_template_format none",
    "messages": (
        "--dataset_name data/chat --chat_template_format chatml --dataset_text_field content"
    ),
}
# Loops on accelerate, each with a config beside it, and the adapter that each leaves.
LOOPS = {
    "causal_language_modeling/peft_lora_clm_accelerate_ds_zero3_offload.py": (
        "twitter_complaints_bigscience_bloomz-7b1_PeftType.LORA_TaskType.CAUSAL_LM"
    ),
    "conditional_generation/peft_lora_seq2seq_accelerate_ds_zero3_offload.py": (
        "twitter_complaints_facebook_bart-large_PeftType.LORA_TaskType.SEQ_2_SEQ_LM"
    ),
}

_LOSS = re.compile(r"step loss: ([\d.e-]+)")


class Examples:
    """The examples, and a folder for each run with what they would download."""

    def __init__(self, folder: Path) -> None:
        source = sources.read_source(Path(__file__).parent / "peft" / "repository.toml")
        sources.fetch(source)
        self.root, self._folder = source.root / "examples", folder

    def folder(self, name: str) -> Path:
        folder = self._folder / name
        peft_material.write(folder)
        material.write_model(folder / "model")
        material.write_data(folder / "data")
        return folder

    def plain(self, line: str) -> tuple[str, Path]:
        """What an example prints by plain torch, in one process, and its folder."""
        folder = self.folder("plain")
        script, *words = line.split()
        said = runs.by_torch(
            ["python", str(self.root / script), *words], cwd=folder, ACCELERATE_USE_CPU="true",
            HF_HOME=str(folder / "home"),
        ).said  # fmt: skip
        return said, folder

    def ours(self, line: str, config: str, *more: str) -> tuple[str, Path]:
        """The same by spmdzero on two devices, with an example's config of accelerate's."""
        folder = self.folder("ours")
        script, *words = line.split()
        launch = ["accelerate", "launch", "--config_file", str(self.root / config), *more]
        said = runs.by_spmdzero(
            [*launch, str(self.root / script), *words], cwd=folder, HF_HOME=str(folder / "home")
        ).said
        return said, folder


@pytest.fixture
def examples(tmp_path: Path) -> Examples:
    return Examples(tmp_path)


@pytest.mark.parametrize(("data", "stage"), [("text", 3), ("text", 2), ("messages", 2)])
def test_supervised_finetuning_is_that_of_plain_torch(
    data: str, stage: int, examples: Examples
) -> None:
    line = f"{SFT} {DATA[data]} --output_dir out"
    _, wanted = examples.plain(line)
    # The config says bf16 and stage 3.
    more = ["--mixed_precision", "no", "--zero_stage", str(stage)]
    more += ["--zero3_init_flag", "false"] if stage == 2 else []
    said, found = examples.ours(line, "sft/configs/deepspeed_config.yaml", *more)
    for key in ("loss", "grad_norm", "eval_loss"):
        ours, plain = (runs.logged(folder / "out", key) for folder in (found, wanted))
        print("\n", data, stage, key, *(f"{a} ({b})," for a, b in zip(ours, plain, strict=True)))
        assert len(plain) == (3 if key == "eval_loss" else 6)
        # fp32: sums in another order.
        assert ours == pytest.approx(plain, rel=1e-4)
    assert f"ZeRO-{stage}" in said
    assert (found / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("script", LOOPS)
def test_a_loop_is_that_of_plain_torch(script: str, examples: Examples) -> None:
    plain, _ = examples.plain(script)
    config = f"{script.split('/')[0]}/accelerate_ds_zero3_cpu_offload_config.yaml"
    # Its config clips gradients, and without DeepSpeed nothing does.
    ours, found = examples.ours(script, config, "--gradient_clipping", "1e9")
    wanted, losses = ([float(x) for x in _LOSS.findall(said)] for said in (plain, ours))
    assert len(wanted) == 8
    print("\n", script, *(f"{a} ({b})," for a, b in zip(losses, wanted, strict=True)))
    # fp32: sums in another order.
    assert losses == pytest.approx(wanted, rel=1e-4)
    generated = re.compile(r"^(?:eval_preds|accuracy).*$", re.MULTILINE)
    assert len(generated.findall(plain)) == 4
    assert generated.findall(ours) == generated.findall(plain)
    assert (found / LOOPS[script] / "adapter_model.safetensors").exists()
    assert "ZeRO-3" in ours
