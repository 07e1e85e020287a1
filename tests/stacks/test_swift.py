"""ms-swift 4.6: `swift pt, sft, rlhf, export` by its own DeepSpeed configs."""

import json
import random
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.stacks import pictures, runs
from tests.stacks.material import ROWS

# The model's type can't be told from a folder. Its `float32` trains in fp16 unless that is off.
TOLD = shlex.split(
    "--model_type llama --template default --use_hf true --check_model false --add_version false "
    "--torch_dtype float32 --fp16 false --bf16 false --report_to none "
    "--per_device_train_batch_size 8 --per_device_eval_batch_size 8 "
    "--gradient_accumulation_steps 1 --max_steps 6 --eval_steps 3 --save_steps 3 "
    "--logging_steps 1 --learning_rate 1e-3 --max_length 128"
)
LORA = shlex.split("--tuner_type lora --lora_rank 8 --lora_dropout 0 --target_modules all-linear")
FULL = shlex.split("--tuner_type full")
# Of the length of what it trains on, thus one program for all batches.
WHOLE_ROWS = shlex.split("--use_logits_to_keep false")
LENGTH = 30


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `chat`, `text` and `pairs` in ms-swift's own form, rows of one length.

    The number of labels differs from row to row.
    """
    folder = tmp_path_factory.mktemp("rows")
    for part, seed, count in (("train", 0, ROWS), ("test", 1, ROWS // 4)):
        draw = random.Random(seed)
        lines: dict[str, list[str]] = {"chat": [], "text": [], "pairs": []}
        for _ in range(count):
            start, said = draw.randrange(120), draw.randrange(2, LENGTH - 2)
            words = [f"w{(start + index) % 120}" for index in range(LENGTH)]
            asked, good = " ".join(words[said:]), " ".join(words[:said])
            chat = [_message("user", asked), _message("assistant", good)]
            bad = " ".join(reversed(words[:said]))
            lines["chat"].append(json.dumps({"messages": chat}))
            lines["pairs"].append(json.dumps({"messages": chat, "rejected_response": bad}))
            text = [_message("assistant", " ".join(words))]
            lines["text"].append(json.dumps({"messages": text}))
        for name, written in lines.items():
            (folder / name).mkdir(exist_ok=True)
            (folder / name / f"{part}.jsonl").write_text("\n".join(written) + "\n")
    return folder


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Commands:
    """Commands of ms-swift on one model, each run by plain torch once."""

    def __init__(self, model: Path, folder: Path, told: Sequence[str] = TOLD) -> None:
        self._model, self._folder, self._told = model, folder, told
        self._plain: dict[tuple[str, ...], Path] = {}

    def plain(self, words: Sequence[str], data: Path) -> Path:
        """The output folder of `swift WORDS` by plain torch, in one process."""
        key = (*words, str(data))
        if key not in self._plain:
            into = self._folder / f"plain_{len(self._plain)}"
            runs.by_torch(self._all(words, data, into), cwd=self._folder)
            self._plain[key] = into
        return self._plain[key]

    def ours(self, words: Sequence[str], data: Path, into: Path, **variables: str) -> runs.Ended:
        """Runs `swift WORDS` by spmdzero."""
        return runs.by_spmdzero(self._all(words, data, into), cwd=self._folder, **variables)

    def _all(self, words: Sequence[str], data: Path, into: Path) -> list[str]:
        files = ["--dataset", data / "train.jsonl", "--val_dataset", data / "test.jsonl"]
        told = ["--model", self._model, *files, "--output_dir", into]
        return ["swift", *words, *self._told, *map(str, told)]


@pytest.fixture(scope="session")
def commands(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """ms-swift's commands on the small model."""
    return Commands(model, tmp_path_factory.mktemp("runs"))


def assert_as_plain(found: Path, wanted: Path, *keys: str) -> None:
    """What both have logged under `keys` is the same.

    The bound is fp32's, over six steps that AdamW takes with gradients summed in other orders.
    """
    for key in ("loss", "eval_loss", "grad_norm", *keys):
        values, expected = runs.logged(found, key), runs.logged(wanted, key)
        assert len(expected) == (2 if key.startswith("eval") else 6)
        assert values == pytest.approx(expected, rel=1e-4), key


@pytest.mark.parametrize(
    ("words", "stage"),
    [
        (FULL, "zero2"),
        (FULL, "zero3"),
        (LORA, "zero2"),
        (LORA, "zero3"),
        # A step's labels are those of both its batches.
        ([*FULL, "--gradient_accumulation_steps", "2", "--max_steps", "6"], "zero1"),
        # ms-swift computes the loss itself, from logits.
        ([*FULL, "--loss_scale", "ignore_empty_think", "--enable_dft_loss", "true"], "zero2"),
    ],
    ids=["full-zero2", "full-zero3", "lora-zero2", "lora-zero3", "accumulated", "own-loss"],
)  # fmt: skip
def test_sft(
    words: Sequence[str], stage: str, commands: Commands, rows: Path, tmp_path: Path
) -> None:
    words, data = ["sft", *words, *WHOLE_ROWS], rows / "chat"
    commands.ours([*words, "--deepspeed", stage], data, tmp_path / "out")
    assert_as_plain(tmp_path / "out", commands.plain(words, data), "token_acc")


def test_rows_of_other_lengths_by_ms_swifts_defaults(
    commands: Commands, data: Path, tmp_path: Path
) -> None:
    words = ["sft", *FULL]
    ended = commands.ours([*words, "--deepspeed", "zero2"], data / "chat", tmp_path / "out")
    assert "rows of different lengths are padded to few of them" in ended.said
    assert "--use_logits_to_keep true computes fewer" in ended.said
    assert_as_plain(tmp_path / "out", commands.plain(words, data / "chat"), "token_acc")


def test_pt(commands: Commands, rows: Path, tmp_path: Path) -> None:
    words, data = ["pt", *FULL, *WHOLE_ROWS], rows / "text"
    commands.ours([*words, "--deepspeed", "zero0"], data, tmp_path / "out")
    assert_as_plain(tmp_path / "out", commands.plain(words, data))


@pytest.mark.parametrize("tuner", [FULL, LORA], ids=["full", "lora"])
def test_dpo(tuner: Sequence[str], commands: Commands, rows: Path, tmp_path: Path) -> None:
    words, data = ["rlhf", "--rlhf_type", "dpo", *tuner, *WHOLE_ROWS], rows / "pairs"
    commands.ours([*words, "--deepspeed", "zero2"], data, tmp_path / "out")
    assert_as_plain(tmp_path / "out", commands.plain(words, data), "logps/chosen")


def test_a_run_goes_on_where_it_was_and_its_adapters_are_merged(
    commands: Commands, rows: Path, tmp_path: Path, model: Path
) -> None:
    words, data = ["sft", *LORA, *WHOLE_ROWS, "--deepspeed", "zero2"], rows / "chat"
    commands.ours(words, data, tmp_path / "whole")
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", half / "checkpoint-3")
    again = [*words, "--resume_from_checkpoint", str(half / "checkpoint-3")]
    commands.ours(again, data, half)
    # Bit for bit.
    assert runs.logged(half) == runs.logged(tmp_path / "whole")

    adapters, merged = half / "checkpoint-6", tmp_path / "merged"
    export = ["swift", "export", "--adapters", adapters, "--merge_lora", "true", "--use_hf", "true"]
    runs.by_spmdzero([*map(str, export), "--output_dir", str(merged)], cwd=tmp_path)
    runs.assert_merged(model, adapters, merged)


def test_its_own_launcher_starts_one_process(
    commands: Commands, rows: Path, tmp_path: Path
) -> None:
    words, data = ["sft", *FULL, *WHOLE_ROWS], rows / "chat"
    ended = commands.ours(
        [*words, "--deepspeed", "zero2"], data, tmp_path / "out", NPROC_PER_NODE="2"
    )
    assert "2 processes on each host were asked for" in ended.said
    assert_as_plain(tmp_path / "out", commands.plain(words, data))


# Qwen-VL's template has these numbers in its code.
QWENS = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645,
    "<|vision_start|>": 151652, "<|vision_end|>": 151653,
    "<|image_pad|>": 151655, "<|video_pad|>": 151656,
}  # fmt: skip


@pytest.fixture(scope="session")
def captions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `train.jsonl` and `test.jsonl` with pictures, in ms-swift's own form."""
    folder = pictures.write_data(tmp_path_factory.mktemp("captions") / "data", [(56, 56)])
    for path in folder.glob("*.jsonl"):
        lines = []
        for line in path.read_text().splitlines():
            row = json.loads(line)
            asked, said = (message["content"][-1]["text"] for message in row["messages"])
            chat = [_message("user", f"<image>{asked}"), _message("assistant", said)]
            images = [str(folder / name) for name in row["images"]]
            lines.append(json.dumps({"messages": chat, "images": images}))
        path.write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("kind", "tuner", "stage"),
    [("qwen2_5_vl", FULL, "zero2"), ("qwen2_5_vl", LORA, "zero3"), ("qwen3_vl", LORA, "zero2")],
    ids=["qwen2_5_vl, full", "qwen2_5_vl, lora", "qwen3_vl, lora"],
)
def test_sft_with_pictures(
    kind: str, tuner: Sequence[str], stage: str, captions: Path, tmp_path: Path
) -> None:
    model = pictures.write_model(tmp_path / "model", kind, QWENS)
    told = [kind if word in ("llama", "default") else word for word in TOLD]
    commands = Commands(model, tmp_path, told)
    words = ["sft", *tuner, *WHOLE_ROWS]
    ended = commands.ours([*words, "--deepspeed", stage], captions, tmp_path / "out")
    plain = commands.plain(words, captions)
    for key in ("loss", "grad_norm"):
        pairs = zip(runs.logged(tmp_path / "out", key), runs.logged(plain, key), strict=True)
        print(f"\n{kind}, {stage}, {key}:", *(f"{a:.6f} ({b:.6f})" for a, b in pairs))
    assert_as_plain(tmp_path / "out", plain)
    assert f"ZeRO-{stage[-1]}" in ended.said
