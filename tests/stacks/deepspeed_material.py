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
    """Writes `data/cifar-10-batches-py`, `wikitext`, `roberta-base`, `opt` and `bing`.

    Args:
        folder: where the scripts run.
        chat: DeepSpeed-Chat's folder, whose `data` is the data set "local/jsonfile".
    """
    _write_pictures(folder / "data" / "cifar-10-batches-py")
    _write_texts(folder / "wikitext")
    _write_tokenizer(folder / "roberta-base")
    _write_opt(folder / "opt")
    _write_bing(folder / "bing")
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


def _write_bing(folder: Path) -> None:
    """Writes a vocabulary, and rows with masked words in the form of NVIDIA's pretraining data.

    The rows of `even` have four masked words each, of those of `ragged` a third have three. The
    files `even.json` and `ragged.json` are configs of bing_bert, `stage_N.json` DeepSpeed's.
    """
    folder.mkdir()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*specials, *_WORDS]) + "\n")
    model = {
        "vocab_size_or_config_json_file": 100, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 64, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 2,
        "max_position_embeddings": 64, "initializer_range": 0.02,
    }  # fmt: skip
    training = {
        "num_epochs": 2, "warmup_proportion": 0.25, "learning_rate": 2e-3, "num_workers": 0,
        "async_worker": True, "decay_rate": 0.9, "decay_step": 4, "total_training_steps": 8,
    }  # fmt: skip
    for name in ("even", "ragged"):
        data = {"mixed_seq_datasets": {"32": {"pretrain_dataset": f"bing/{name}"}}}
        config = {
            "name": name, "bert_token_file": "bing/vocab.txt", "bert_model_config": model,
            "data": data, "mixed_seq_training": {"32": training},
        }  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(config))
        _write_masked(folder / name, ragged=name == "ragged")
    for stage in range(4):
        config = {
            "train_batch_size": 8, "gradient_clipping": 1.0, "steps_per_print": 1000,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "weight_decay": 0.01}},
        }  # fmt: skip
        (folder / f"stage_{stage}.json").write_text(json.dumps(config))


def _write_masked(folder: Path, *, ragged: bool) -> None:
    import h5py
    import numpy

    folder.mkdir()
    draw = numpy.random.default_rng(0)
    rows, length, masked = 32, 32, 4
    for shard in range(2):
        ids = 5 + (draw.integers(0, 95, (rows, 1)) + numpy.arange(length)) % 95
        ids[:, 0], ids[:, 15], ids[:, -1] = 2, 3, 3
        places = numpy.sort([1 + draw.permutation(14)[:masked] for _ in range(rows)], 1)
        labels = numpy.take_along_axis(ids, places, 1)
        numpy.put_along_axis(ids, places, 4, 1)
        if ragged:
            places[::3, -1] = 0
        with h5py.File(folder / f"training_{shard}.hdf5", "w") as file:
            file["input_ids"], file["input_mask"] = ids, numpy.ones_like(ids)
            file["segment_ids"] = numpy.tile(numpy.arange(length) > 15, (rows, 1)).astype(int)
            file["masked_lm_positions"], file["masked_lm_ids"] = places, labels
            file["next_sentence_labels"] = draw.integers(0, 2, rows)


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _counted(draw: random.Random, least: int, most: int) -> str:
    """Words that count up from a place of their own: what a model can learn."""
    start, count = draw.randrange(len(_WORDS)), draw.randrange(least, most)
    return " ".join(_WORDS[(start + index) % len(_WORDS)] for index in range(count))
