"""A small BERT and data sets of text pairs, as files, for programs that train embeddings."""

import json
import random
from pathlib import Path
from typing import Any

ROWS = 64
_TOPICS = 10
_SYLLABLES = ("ba", "do", "ki", "lu", "me", "no", "pa", "ri", "su", "te")


def write_model(folder: Path) -> Path:
    """Writes a BERT of two blocks in fp32 without dropout, with a WordPiece tokenizer of the data.

    Dropout is left out, since each device draws its own.
    """
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import (
        BertConfig,
        BertModel,
        BertTokenizerFast,  # pyrefly: ignore[missing-module-attribute]
    )

    folder.mkdir(parents=True, exist_ok=True)
    words = BertWordPieceTokenizer()
    draw = random.Random(0)
    texts = [_text(draw, topic % _TOPICS) for topic in range(400)]
    words.train_from_iterator(texts, vocab_size=120, show_progress=False)
    words.save_model(str(folder))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=48)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=48, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


def write_data(folder: Path) -> Path:
    """Writes a folder for each kind of data, each with `train.jsonl` and `test.jsonl`.

    ``pairs`` has `anchor` and `positive`; ``triplets`` has `negative`, too; ``scored`` has
    `sentence1`, `sentence2` and `score`; ``classes`` has `premise`, `hypothesis` and `label`. Texts
    have different lengths.
    """
    for name, row in _KINDS.items():
        (folder / name).mkdir(parents=True)
        for part, seed in (("train", 0), ("test", 1)):
            draw = random.Random(seed)
            lines = [json.dumps(row(draw, index % _TOPICS)) for index in range(ROWS)]
            (folder / name / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _text(draw: random.Random, topic: int) -> str:
    """Words of a topic's own two syllables, between two and eighteen of them."""
    first, second = _SYLLABLES[topic % 10], _SYLLABLES[(topic * 3 + 1) % 10]
    words = [
        "".join(draw.choice((first, second)) for _ in range(draw.randrange(1, 4)))
        for _ in range(draw.randrange(2, 18))
    ]
    return " ".join(words)


def _pair(draw: random.Random, topic: int) -> dict[str, Any]:
    return {"anchor": _text(draw, topic), "positive": _text(draw, topic)}


def _triplet(draw: random.Random, topic: int) -> dict[str, Any]:
    other = (topic + draw.randrange(1, _TOPICS)) % _TOPICS
    return _pair(draw, topic) | {"negative": _text(draw, other)}


def _scored(draw: random.Random, topic: int) -> dict[str, Any]:
    other = (topic + draw.randrange(3)) % _TOPICS
    texts = {"sentence1": _text(draw, topic), "sentence2": _text(draw, other)}
    return texts | {"score": 1.0 if other == topic else round(draw.uniform(0, 0.5), 1)}


def _class(draw: random.Random, topic: int) -> dict[str, Any]:
    apart = draw.randrange(3)
    texts = {"premise": _text(draw, topic), "hypothesis": _text(draw, (topic + apart) % _TOPICS)}
    return texts | {"label": apart}


_KINDS = {"pairs": _pair, "triplets": _triplet, "scored": _scored, "classes": _class}
