"""Small models of random weights, where Hugging Face's programs look for downloaded ones."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_REVISION = "0" * 40
_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{index}" for index in range(95))]


def write(home: Path) -> Path:
    """Writes a cache of the hub's with all models, unless it is there, and returns `HF_HOME`."""
    made = home / "made"
    if not made.exists() or made.read_text() != Path(__file__).read_text():
        shutil.rmtree(home, ignore_errors=True)
        for name, model in _models().items():
            folder = home / "hub" / f"models--{name.replace('/', '--')}"
            (folder / "refs").mkdir(parents=True)
            (folder / "refs" / "main").write_text(_REVISION)
            model().save_pretrained(folder / "snapshots" / _REVISION)
            _write_tokenizer(folder / "snapshots" / _REVISION)
        _write_glue(home / "datasets")
        made.write_text(Path(__file__).read_text())
    return home


def _models() -> dict[str, Callable[[], Any]]:
    import transformers

    def gpt2() -> Any:
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 1000, "n_positions": 64}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))

    def vision() -> Any:
        return transformers.MobileViTModel(
            transformers.MobileViTConfig(hidden_sizes=[8, 16, 24], neck_hidden_sizes=[4] * 7)
        )

    def experts() -> Any:
        config = transformers.Qwen2MoeConfig(
            vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, moe_intermediate_size=16,
            shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        )  # fmt: skip
        return transformers.Qwen2MoeForCausalLM(config)

    def bert() -> Any:
        config = transformers.BertConfig(
            vocab_size=len(_WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=128,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)

    def distilbert() -> Any:
        config = transformers.DistilBertConfig(
            vocab_size=len(_WORDS), dim=16, n_layers=2, n_heads=2, hidden_dim=32,
            max_position_embeddings=128,
        )  # fmt: skip
        return transformers.DistilBertForSequenceClassification(config)

    def llama() -> Any:
        config = transformers.LlamaConfig(
            vocab_size=1000, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)

    return {
        "bert-base-cased": bert,
        "distilbert-base-uncased": distilbert,
        "hf-internal-testing/tiny-random-gpt2": gpt2,
        "hf-internal-testing/tiny-random-LlamaForCausalLM": llama,
        "sshleifer/tiny-gpt2": gpt2,
        "gpt2": gpt2,
        "apple/mobilevit-xx-small": vision,
        "peft-internal-testing/tiny-random-qwen-1.5-MoE": experts,
    }


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {name: index for index, name in enumerate(_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=128,
    ).save_pretrained(folder)  # fmt: skip


def _write_glue(cache: Path) -> None:
    """Writes MRPC as `load_dataset("nyu-mll/glue", "mrpc")` finds it when it is offline.

    Nine of ten pairs are paraphrases: what models of random weights reach 82% right with.
    """
    import datasets
    from datasets.arrow_writer import ArrowWriter

    features = datasets.Features(
        {"sentence1": datasets.Value("string"), "sentence2": datasets.Value("string"),
         "label": datasets.ClassLabel(names=["not_equivalent", "equivalent"]),
         "idx": datasets.Value("int32")}
    )  # fmt: skip
    folder = cache / "nyu-mll___glue" / "mrpc" / "0.0.0" / _REVISION
    folder.mkdir(parents=True)
    splits = datasets.splits.SplitDict(dataset_name="glue")
    for split, count in (("train", 160), ("validation", 48), ("test", 48)):
        with ArrowWriter(path=str(folder / f"glue-{split}.arrow"), features=features) as writer:
            for row in range(count):
                words = [f"w{(row * 7 + step) % 95}" for step in range(4 + row % 5)]
                pair = {"sentence1": " ".join(words), "sentence2": " ".join(reversed(words))}
                writer.write({**pair, "label": int(row % 10 != 0), "idx": row})
            writer.finalize()
        splits.add(datasets.SplitInfo(name=split, num_examples=count))
    datasets.DatasetInfo(
        features=features, splits=splits, config_name="mrpc", dataset_name="glue", version="0.0.0"
    ).write_to_directory(str(folder))
