"""Writes what peft's loops would download, under the names that they ask for."""

import random
from pathlib import Path
from typing import Any

_WORDS = [f"w{index}" for index in range(60)]
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
# Words of the loops' own prompts, and the labels, both of one token: the loss is the mean over the
# labels of the rows that a device is given.
_ASKED = ["Tweet", "text", ":", "Label", "praise", "complaint"]
ROWS = 32


def write(folder: Path) -> Path:
    """Writes the folder.

    ``bigscience/bloomz-7b1`` and ``facebook/bart-large`` are models of two layers without dropout,
    ``raft/twitter_complaints`` has texts with two labels.
    """
    import torch
    import transformers

    names = [*_SPECIAL, *_ASKED, *_WORDS]
    shape = {
        "vocab_size": len(names), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    bloom = transformers.BloomConfig(
        **shape,
        hidden_size=64,
        n_layer=2,
        n_head=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        initializer_range=0.2,
    )
    bart = transformers.BartConfig(
        **shape, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, dropout=0.0,
        init_std=0.2, max_position_embeddings=64, forced_eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    models = {
        "bigscience/bloomz-7b1": transformers.BloomForCausalLM(bloom),
        "facebook/bart-large": transformers.BartForConditionalGeneration(bart),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        _tokenizer(names).save_pretrained(folder / name)
    _write_rows(folder / "raft" / "twitter_complaints")
    return folder


def _tokenizer(names: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>", model_max_length=64,
    )  # fmt: skip


def _write_rows(folder: Path) -> None:
    import datasets

    features = datasets.Features(
        {
            "Tweet text": datasets.Value("string"), "ID": datasets.Value("int32"),
            "Label": datasets.ClassLabel(names=["complaint", "praise"]),
        }
    )  # fmt: skip
    draw = random.Random(0)
    for part in ("train", "test"):
        rows = []
        for row in range(ROWS):
            label = draw.randrange(2)
            # One word tells.
            words = [_WORDS[label], *draw.choices(_WORDS[2:], k=draw.randrange(4, 12))]
            rows.append({"Tweet text": " ".join(words), "ID": row, "Label": label})
        (folder / part).mkdir(parents=True)
        data = datasets.Dataset.from_list(rows, features=features)
        data.to_parquet(folder / part / "0000.parquet")
