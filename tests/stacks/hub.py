"""A folder with what the examples would download, under the names that they ask for.

`from_pretrained`, `load_dataset` and `evaluate.load` take a folder of the working directory before
they ask Hugging Face's hub.
"""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.stacks import material

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_WORDS = [f"w{index}" for index in range(95)]
# An odd number of rows to evaluate: the last batch is one that two devices can't share.
TRAINED, EVALUATED = 96, 41
_GLUE = """---
configs:
- config_name: mrpc
  data_files:
  - {split: train, path: mrpc/train.jsonl}
  - {split: validation, path: mrpc/validation.jsonl}
  - {split: test, path: mrpc/validation.jsonl}
dataset_info:
  config_name: mrpc
  features:
  - {name: sentence1, dtype: string}
  - {name: sentence2, dtype: string}
  - name: label
    dtype:
      class_label:
        names:
          '0': not_equivalent
          '1': equivalent
  - {name: idx, dtype: int32}
---
"""


def write(folder: Path, metrics: Path) -> Path:
    """Writes the folder.

    ``bert-base-cased``, ``llama``, ``t5``, ``vit`` and ``whisper`` are models of random weights
    without dropout, ``nyu-mll/glue`` has MRPC, ``speech`` sounds and their words, ``text``,
    ``pairs`` and ``pictures`` are files for `--train_file` and `--train_dir`.

    Args:
        metrics: the folder of `evaluate`'s metrics.
    """
    from transformers import ViTImageProcessor

    material.write_model(folder / "llama")
    for name, model in _models().items():
        model.save_pretrained(folder / name)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "vit")
    for name in ("bert-base-cased", "t5"):
        _write_tokenizer(folder / name)
    _write_rows(folder / "nyu-mll/glue/mrpc", "train.jsonl", "validation.jsonl", _pairs_of_mrpc)
    (folder / "nyu-mll/glue/README.md").write_text(_GLUE)
    _write_rows(folder / "pairs", "train.json", "validation.json", _translations)
    _write_text(folder / "text")
    _write_pictures(folder / "pictures")
    _write_whisper(folder / "whisper")
    _write_speech(folder / "speech")
    for metric in metrics.iterdir():
        shutil.copytree(metric, folder / metric.name)
    return folder


def _models() -> dict[str, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    size = len(_SPECIAL) + len(_WORDS)
    bert = transformers.BertConfig(
        vocab_size=size, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=128, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, initializer_range=0.2,
    )  # fmt: skip
    t5 = transformers.T5Config(
        vocab_size=size, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        dropout_rate=0.0, pad_token_id=0, eos_token_id=3, decoder_start_token_id=0,
    )  # fmt: skip
    vit = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        image_size=32, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return {
        "bert-base-cased": transformers.BertForMaskedLM(bert),
        "t5": transformers.T5ForConditionalGeneration(t5),
        "vit": transformers.ViTForImageClassification(vit),
    }


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = [*_SPECIAL, *_WORDS]
    words = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", eos_token="[SEP]", model_max_length=128,
    ).save_pretrained(folder)  # fmt: skip


def _write_rows(folder: Path, train: str, validation: str, rows: Any) -> None:
    folder.mkdir(parents=True)
    for name, seed, count in ((train, 0, TRAINED), (validation, 1, EVALUATED)):
        lines = [json.dumps(row) for row in rows(random.Random(seed), count)]
        (folder / name).write_text("\n".join(lines) + "\n")


def _pairs_of_mrpc(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for row in range(count):
        words = _counted(draw, 4, 24)
        label = draw.randrange(2)
        # One word tells, which a small model learns in a dozen steps.
        other = [_WORDS[label]] * 4 + words[4:]
        pair = {"sentence1": " ".join(words), "sentence2": " ".join(other)}
        yield {**pair, "label": label, "idx": row}


def _translations(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        words = _counted(draw, 8, 24)
        # Of one length: T5's own loss is the mean over the labels of the rows that it is given.
        yield {"translation": {"en": " ".join(words), "ro": " ".join(words[:8])}}


def _counted(draw: random.Random, least: int, most: int) -> list[str]:
    start, count = draw.randrange(len(_WORDS)), draw.randrange(least, most)
    return [_WORDS[(start + index) % len(_WORDS)] for index in range(count)]


def _write_text(folder: Path) -> None:
    folder.mkdir()
    for name, seed, count in (("train.txt", 0, 6 * TRAINED), ("validation.txt", 1, 120)):
        draw = random.Random(seed)
        lines = [" ".join(_counted(draw, 8, 40)) for _ in range(count)]
        (folder / name).write_text("\n".join(lines) + "\n")


def _write_pictures(folder: Path) -> None:
    """Writes a folder of pictures for each class, and all of them in one with the class's name."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    for part, count in (("train", TRAINED), ("validation", EVALUATED)):
        for row in range(count):
            name = ("cat", "dog")[row % 2]
            # Cats are bright above, dogs below.
            pixels = draw.integers(0, 128, (48, 48, 3), dtype=numpy.uint8)
            half = slice(0, 24) if name == "cat" else slice(24, 48)
            pixels[half] += 96
            path = folder / part / name / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
            flat = folder / "flat" / f"{name}_{row}.jpg"
            flat.parent.mkdir(exist_ok=True)
            if part == "train":
                Image.fromarray(pixels).save(flat)


def _write_whisper(folder: Path) -> None:
    """Writes a model that hears a second, with a token for each letter."""
    import torch
    import transformers

    letters = ["Ġ", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    end, start, marker = "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"
    names = {name: index for index, name in enumerate([*letters, end, start, marker])}
    tokenizer = transformers.WhisperTokenizer(
        vocab=names, merges=[], unk_token=end, bos_token=end, eos_token=end, pad_token=end
    )
    heard = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    transformers.WhisperProcessor(heard, tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=len(names), d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=50, max_target_positions=32,
        dropout=0.0, pad_token_id=names[end], bos_token_id=names[end], eos_token_id=names[end],
        decoder_start_token_id=names[start],
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.is_multilingual = False
    model.generation_config.no_timestamps_token_id = names[marker]
    model.save_pretrained(folder)


def _write_speech(folder: Path) -> None:
    """Writes tones of a quarter of a second, and a word of three letters for each."""
    import datasets
    import numpy

    time = numpy.arange(4000) / 16000
    for part, count in (("train", TRAINED), ("test", EVALUATED)):
        rows = []
        for row in range(count):
            tone = numpy.sin(2 * numpy.pi * 200 * (1 + row % 9) * time).astype("float32")
            audio = {"array": tone, "sampling_rate": 16000}
            rows.append({"audio": audio, "text": f"w{10 + row % 9}"})
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{part}.parquet")
