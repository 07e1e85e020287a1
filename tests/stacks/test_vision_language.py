"""Qwen-VL and LLaVA by transformers' Trainer with a ds_config.json, beside plain torch."""

import json
from pathlib import Path

import pytest

from tests.stacks import pictures
from tests.stacks.runs import by_spmdzero, by_torch, logged

SCRIPT = Path(__file__).parent / "vision_script.py"
STEPS = 6
USUAL = [
    "--per_device_train_batch_size", "8", "--learning_rate", "1e-3", "--max_steps", str(STEPS),
    "--logging_steps", "1", "--report_to", "none", "--seed", "1", "--disable_tqdm", "true",
    "--save_steps", "3",
]  # fmt: skip
ONE_SIZE, SIZES = [(16, 16)], [(16, 16), (24, 16), (16, 32), (16, 16)]
LORA = ["--use_peft", "--lora_target_modules", "all-linear", "--lora_dropout", "0.0"]
AUTO = (
    "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping",
    "gradient_accumulation_steps",
)  # fmt: skip


class Script:
    """The script with a model and pictures, run into folders of its own."""

    def __init__(self, kind: str, sizes: list[tuple[int, int]], folder: Path) -> None:
        self._model = pictures.write_model(folder / "model", kind)
        self._data = pictures.write_data(folder / "data", sizes)
        self._folder = folder

    def _words(self, out: Path, *more: str) -> list[str]:
        told = [SCRIPT, self._model, self._data, "--output_dir", out]
        return [*map(str, told), *USUAL, *more]

    def ours(self, name: str, stage: int, *more: str) -> tuple[Path, str]:
        """Runs it by spmdzero; returns its folder, and what it said."""
        config, out = self._folder / f"ds_{stage}.json", self._folder / name
        told = dict.fromkeys(AUTO, "auto") | {"zero_optimization": {"stage": stage}}
        config.write_text(json.dumps(told))
        words = self._words(out, "--deepspeed", str(config), *more)
        return out, by_spmdzero(words, cwd=self._folder).said

    def plain(self, *more: str) -> Path:
        """Runs it by plain torch; returns its folder."""
        out = self._folder / "plain"
        by_torch(["python", *self._words(out, "--use_cpu", *more)], cwd=self._folder)
        return out


def _assert_equal(ours: Path, plain: Path, what: str) -> None:
    for key in ("loss", "grad_norm"):
        found, wanted = logged(ours, key), logged(plain, key)
        assert len(wanted) == STEPS
        pairs = zip(found, wanted, strict=True)
        print(f"\n{what}, {key}:", *(f"{a:.6f} ({b:.6f})" for a, b in pairs))
        # fp32: sums in another order, through six steps of AdamW.
        assert found == pytest.approx(wanted, rel=1e-4), key


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_a_model_has_the_losses_of_plain_torch(kind: str, stage: int, tmp_path: Path) -> None:
    script = Script(kind, ONE_SIZE, tmp_path)
    ours, said = script.ours("ours", stage)
    _assert_equal(ours, script.plain(), f"{kind}, stage {stage}")
    assert f"ZeRO-{stage}" in said
    assert "computes all rows" not in said


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_pictures_of_other_sizes_on_each_device_are_computed_by_all(
    kind: str, tmp_path: Path
) -> None:
    script = Script(kind, SIZES, tmp_path)
    ours, said = script.ours("ours", 2)
    _assert_equal(ours, script.plain(), f"{kind}, other sizes")
    assert "each device computes all rows" in said


@pytest.mark.parametrize(
    ("kind", "sizes", "stage"),
    [("qwen2_5_vl", ONE_SIZE, 2), ("qwen3_vl", SIZES, 3), ("llava", ONE_SIZE, 2)],
    ids=["qwen2_5_vl", "qwen3_vl, other sizes", "llava"],
)
def test_a_trainer_evaluates_as_plain_torch_does(
    kind: str, sizes: list[tuple[int, int]], stage: int, tmp_path: Path
) -> None:
    script = Script(kind, sizes, tmp_path)
    more = ["--eval_strategy", "steps", "--eval_steps", "3", "--per_device_eval_batch_size", "8"]
    ours, _ = script.ours("ours", stage, *more)
    plain = script.plain(*more)
    _assert_equal(ours, plain, f"{kind}, evaluated")
    found, wanted = logged(ours, "eval_loss"), logged(plain, "eval_loss")
    pairs = zip(found, wanted, strict=True)
    print(f"\n{kind}, eval_loss:", *(f"{a:.6f} ({b:.6f})" for a, b in pairs))
    assert len(wanted) == 2
    # fp32, as above.
    assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "stage", "more"),
    [
        ("qwen2_5_vl", "zero2", []),
        ("qwen3_vl", "zero3", []),
        ("llava", "zero2", []),
        ("qwen3_vl", "zero2", LORA),
    ],
    ids=["qwen2_5_vl", "qwen3_vl", "llava", "LoRA"],
)
def test_trls_command_has_the_losses_of_plain_torch(
    kind: str, stage: str, more: list[str], tmp_path: Path
) -> None:
    model = pictures.write_model(tmp_path / "model", kind)
    data = pictures.write_table(
        tmp_path / "table", pictures.write_data(tmp_path / "data", ONE_SIZE)
    )

    def words(out: str) -> list[str]:
        told = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", out]
        # Pictures can't be cut off with the text, and TRL asks to leave the length open.
        return ["trl", "sft", *map(str, told), *USUAL, "--bf16", "false", "--max_length", "None"]

    ours = ["--accelerate_config", stage, "--mixed_precision", "no"]
    said = by_spmdzero([*words("ours"), *ours, *more], cwd=tmp_path).said
    by_torch([*words("plain"), *more], cwd=tmp_path)
    _assert_equal(tmp_path / "ours", tmp_path / "plain", f"trl sft of {kind}, {stage} {more}")
    assert f"ZeRO-{stage[-1]}" in said


def test_it_resumes_and_leaves_a_model_of_transformers(tmp_path: Path) -> None:
    script = Script("qwen3_vl", ONE_SIZE, tmp_path)
    straight, _ = script.ours("straight", 3)
    plain = script.plain()
    checkpoint = str(straight / "checkpoint-3")
    again, _ = script.ours("again", 3, "--resume_from_checkpoint", checkpoint)
    assert logged(again) == logged(straight)

    import torch
    from transformers import AutoModelForImageTextToText

    found, wanted = (
        AutoModelForImageTextToText.from_pretrained(folder / "final").state_dict()
        for folder in (straight, plain)
    )
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        # AdamW's steps are of the learning rate's size, whatever the gradient's rounding is.
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-3, msg=name)
