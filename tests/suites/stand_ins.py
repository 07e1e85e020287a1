"""Small models of random weights, where Hugging Face's programs look for downloaded ones."""

import shutil
from pathlib import Path
from typing import Any

from tests.suites import stand_in_data

_REVISION = "0" * 40
_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(95))]

_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def write(home: Path) -> Path:
    """Writes a cache of the hub's with all models, unless it is there, and returns `HF_HOME`."""
    made = home / "made"
    if not made.exists() or made.read_text() != _source():
        shutil.rmtree(home, ignore_errors=True)
        for name in _MODELS:
            folder = home / "hub" / f"models--{name.replace('/', '--')}"
            (folder / "refs").mkdir(parents=True)
            (folder / "refs" / "main").write_text(_REVISION)
            _model(name).save_pretrained(folder / "snapshots" / _REVISION)
            _write_tokenizer(folder / "snapshots" / _REVISION, name)
        stand_in_data.write(home / "datasets", _REVISION)
        made.write_text(_source())
    return home


def _source() -> str:
    return Path(__file__).read_text() + Path(stand_in_data.__file__).read_text()


# What most models of texts have in common.
_SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_OF_WORDS = {"vocab_size": len(_WORDS), **_SMALL}
_GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 1000, "n_positions": 64}
_QWEN2 = {
    **_SMALL, "vocab_size": 272, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 256,
    "eos_token_id": 256, "num_labels": 1,
}  # fmt: skip
# Name on the hub -> class of the model, class of its config, and what the config says.
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **dict.fromkeys(
        ["bert-base-cased", "hf-internal-testing/tiny-bert"],
        (
            "BertForSequenceClassification", "BertConfig",
            _OF_WORDS | {"max_position_embeddings": 128},
        ),
    ),
    "distilbert-base-uncased": (
        "DistilBertForSequenceClassification", "DistilBertConfig",
        {
            "vocab_size": len(_WORDS), "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32,
            "max_position_embeddings": 128,
        },
    ),
    **dict.fromkeys(
        ["hf-internal-testing/tiny-random-gpt2", "sshleifer/tiny-gpt2", "gpt2"],
        ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    ),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": (
        "LlamaForCausalLM", "LlamaConfig",
        {
            **_SMALL, "vocab_size": 1000, "num_attention_heads": 4, "num_key_value_heads": 4,
            "max_position_embeddings": 256,
        },
    ),
    "hf-internal-testing/tiny-random-gptj": (
        "GPTJModel", "GPTJConfig",
        {
            "vocab_size": len(_WORDS), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "rotary_dim": 4,
        },
    ),
    "patrickvonplaten/t5-tiny-random": (
        "T5ForConditionalGeneration", "T5Config",
        {
            "vocab_size": 128, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2,
            "num_heads": 2, "decoder_start_token_id": 0,
        },
    ),
    "hf-internal-testing/tiny-albert": (
        "AlbertForMaskedLM", "AlbertConfig",
        _OF_WORDS | {"embedding_size": 16, "max_position_embeddings": 128},
    ),
    "sshleifer/tiny-distilroberta-base": (
        "RobertaForQuestionAnswering", "RobertaConfig",
        _OF_WORDS | {"max_position_embeddings": 514, "pad_token_id": 0},
    ),
    **{
        f"trl-internal-testing/tiny-{kind}-2.5": (kind, "Qwen2Config", _QWEN2)
        for kind in ("Qwen2ForCausalLM", "Qwen2ForSequenceClassification")
    },
    "apple/mobilevit-xx-small": (
        "MobileViTModel", "MobileViTConfig",
        {"hidden_sizes": [8, 16, 24], "neck_hidden_sizes": [4] * 7},
    ),
    "peft-internal-testing/tiny-random-qwen-1.5-MoE": (
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        {
            **_SMALL, "vocab_size": 100, "num_key_value_heads": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
        },
    ),
}  # fmt: skip


def _model(name: str) -> Any:
    import transformers

    model, config, sizes = _MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


def _write_tokenizer(folder: Path, name: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer, T5Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    # Two classes whose pieces are of a kind of their own, whatever the file of a tokenizer says.
    if "t5" in name:
        T5Tokenizer(model_max_length=128).save_pretrained(folder)
        return
    if "Qwen2" in name:
        pieces = [*bytes_to_unicode().values(), "<|endoftext|>"]
        Qwen2Tokenizer(
            vocab={piece: index for index, piece in enumerate(pieces)}, merges=[],
            model_max_length=1024, chat_template=_TEMPLATE,
        ).save_pretrained(folder)  # fmt: skip
        return
    words = {word: index for index, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=128,
    ).save_pretrained(folder)  # fmt: skip
