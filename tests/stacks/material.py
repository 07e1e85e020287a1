"""A small model and small data sets, as files, for programs that want to download theirs."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS = 64
_WORDS = [f"w{index}" for index in range(120)]
_SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ ' </s> ' }}{% else %}{{ ' ' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Writes a Llama of two blocks in fp32, with a tokenizer of words and a chat template."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = [*_SPECIAL, *_WORDS]
    words = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=_SPECIAL[3:], model_max_length=128,
    )  # fmt: skip
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(names), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_judge(folder: Path, model: Path) -> Path:
    """Writes a model with one output, a reward, and the tokenizer of the folder `model`."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(1)
    judge = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    judge.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def write_data(folder: Path) -> Path:
    """Writes a folder for each kind of data, each with `train.jsonl` and `test.jsonl`.

    ``text`` has `text`; ``chat`` has `messages` with `role` and `content`; ``alpaca`` has
    `instruction`, `input` and `output`; ``preference`` has `prompt`, `chosen` and `rejected`;
    ``unpaired`` has `prompt`, `completion` and `label`. Rows have different lengths.
    """
    for name, rows in _sets().items():
        (folder / name).mkdir(parents=True)
        for part, seed in (("train", 0), ("test", 1)):
            lines = [json.dumps(row) for row in rows(random.Random(seed))]
            (folder / name / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _sets() -> dict[str, Any]:
    def text(draw: random.Random) -> Iterator[dict[str, Any]]:
        for _ in range(ROWS):
            yield {"text": _counted(draw, 8, 40)}

    def chat(draw: random.Random) -> Iterator[dict[str, Any]]:
        for _ in range(ROWS):
            yield {
                "messages": [
                    {"role": "user", "content": _counted(draw, 3, 12)},
                    {"role": "assistant", "content": _counted(draw, 4, 24)},
                ]
            }

    def alpaca(draw: random.Random) -> Iterator[dict[str, Any]]:
        for _ in range(ROWS):
            asked, said = _counted(draw, 3, 12), _counted(draw, 4, 24)
            yield {"instruction": asked, "input": "", "output": said}

    def preference(draw: random.Random) -> Iterator[dict[str, Any]]:
        for _ in range(ROWS):
            good, bad = _counted(draw, 4, 16), _counted(draw, 4, 16).split()
            yield {
                "prompt": _counted(draw, 3, 10), "chosen": good,
                "rejected": " ".join(reversed(bad)),
            }  # fmt: skip

    def unpaired(draw: random.Random) -> Iterator[dict[str, Any]]:
        for row in range(ROWS):
            said = _counted(draw, 4, 16).split()
            good = row % 2 == 0
            yield {
                "prompt": _counted(draw, 3, 10), "label": good,
                "completion": " ".join(said if good else reversed(said)),
            }  # fmt: skip

    return {
        "text": text, "chat": chat, "alpaca": alpaca, "preference": preference,
        "unpaired": unpaired,
    }  # fmt: skip


def _counted(draw: random.Random, least: int, most: int) -> str:
    """Words that count up from a place of their own: what a model can learn."""
    start, count = draw.randrange(len(_WORDS)), draw.randrange(least, most)
    return " ".join(_WORDS[(start + index) % len(_WORDS)] for index in range(count))
