"""Writes what DeepSpeedExamples would download, under the names that its scripts ask for."""

import json
import pickle
import random
from pathlib import Path
from typing import Any

_WORDS = [f"w{index}" for index in range(95)]
_WIKITEXT = """---
configs:
- config_name: wikitext-2-v1
  data_files:
  - {split: train, path: train.jsonl}
---
"""
# Of a file of pictures: five make five steps of 16 pictures.
_PICTURES = 16


def write(folder: Path, chat: Path) -> None:
    """Writes `data/cifar-10-batches-py`, `wikitext`, `roberta-base` and `opt` into a folder.

    Args:
        folder: where the scripts run.
        chat: DeepSpeed-Chat's folder, whose `data` is the data set "local/jsonfile".
    """
    _write_pictures(folder / "data" / "cifar-10-batches-py")
    _write_texts(folder / "wikitext")
    _write_tokenizer(folder / "roberta-base")
    _write_opt(folder / "opt")
    _write_preferences(chat / "data")


def _write_pictures(folder: Path) -> None:
    """Writes pickled pictures as CIFAR-10 has them: a class is a brightness."""
    import numpy

    folder.mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    counts = {f"data_batch_{index}": _PICTURES for index in range(1, 6)} | {"test_batch": 40}
    for name, count in counts.items():
        labels = [index % 10 for index in range(count)]
        noise = draw.integers(0, 20, (count, 3 * 32 * 32))
        data = (noise + 20 * numpy.array(labels)[:, None]).astype("uint8")
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": labels}))
    names = {"label_names": [f"class{index}" for index in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names))


def _write_texts(folder: Path) -> None:
    folder.mkdir()
    draw = random.Random(0)
    _write_lines(folder / "train.jsonl", [{"text": _counted(draw, 8, 40)} for _ in range(96)])
    (folder / "README.md").write_text(_WIKITEXT)


def _write_preferences(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, seed, count in (("train", 1, 120), ("eval", 2, 40)):
        draw = random.Random(seed)
        rows = list[dict[str, Any]]()
        for _ in range(count):
            said = _counted(draw, 4, 12)
            # Of one length, and the first word differs.
            bad = " ".join(reversed(said.split()))
            rows.append({"prompt": _counted(draw, 3, 8), "chosen": said, "rejected": bad})
        _write_lines(folder / f"{name}.json", rows)


def _write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of words with RoBERTa's special tokens, of which padding is 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *_WORDS]
    words = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", pad_token="<pad>", eos_token="</s>",
        unk_token="<unk>", mask_token="<mask>",
    ).save_pretrained(folder)  # fmt: skip


def _write_opt(folder: Path) -> None:
    """Writes an OPT of two blocks without dropout, with a byte-level tokenizer as OPT has one."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import (
        GPT2TokenizerFast,  # pyrefly: ignore[missing-module-attribute]
        OPTConfig,
        OPTForCausalLM,
    )

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [" ".join(_WORDS)], vocab_size=400, special_tokens=["<s>", "<pad>", "</s>"]
    )
    folder.mkdir()
    trained.save_model(str(folder))
    GPT2TokenizerFast(
        vocab_file=str(folder / "vocab.json"), merges_file=str(folder / "merges.txt"),
        bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>",
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=400, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=128, dropout=0.0, pad_token_id=1,
        bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(folder)


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _counted(draw: random.Random, least: int, most: int) -> str:
    """Words that count up from a place of their own: what a model can learn."""
    start, count = draw.randrange(len(_WORDS)), draw.randrange(least, most)
    return " ".join(_WORDS[(start + index) % len(_WORDS)] for index in range(count))
