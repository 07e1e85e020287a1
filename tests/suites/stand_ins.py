"""Small models of random weights, where Hugging Face's programs look for downloaded ones."""

import functools
import shutil
from collections.abc import Callable
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
        for name, model in _models().items():
            folder = home / "hub" / f"models--{name.replace('/', '--')}"
            (folder / "refs").mkdir(parents=True)
            (folder / "refs" / "main").write_text(_REVISION)
            model().save_pretrained(folder / "snapshots" / _REVISION)
            _write_tokenizer(folder / "snapshots" / _REVISION, name)
        stand_in_data.write(home / "datasets", _REVISION)
        made.write_text(_source())
    return home


def _source() -> str:
    return Path(__file__).read_text() + Path(stand_in_data.__file__).read_text()


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

    def gptj() -> Any:
        return transformers.GPTJModel(
            transformers.GPTJConfig(
                vocab_size=len(_WORDS), n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4
            )
        )

    qwen2_config = transformers.Qwen2Config(
        vocab_size=272, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        pad_token_id=256, eos_token_id=256, num_labels=1,
    )  # fmt: skip

    def t5() -> Any:
        config = transformers.T5Config(
            vocab_size=128, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
            decoder_start_token_id=0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)

    def albert() -> Any:
        config = transformers.AlbertConfig(
            vocab_size=len(_WORDS), embedding_size=16, hidden_size=16, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=32, max_position_embeddings=128,
        )  # fmt: skip
        return transformers.AlbertForMaskedLM(config)

    def roberta() -> Any:
        config = transformers.RobertaConfig(
            vocab_size=len(_WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=514, pad_token_id=0,
        )  # fmt: skip
        return transformers.RobertaForQuestionAnswering(config)

    return {
        "bert-base-cased": bert,
        "distilbert-base-uncased": distilbert,
        "hf-internal-testing/tiny-random-gpt2": gpt2,
        "hf-internal-testing/tiny-random-LlamaForCausalLM": llama,
        "sshleifer/tiny-gpt2": gpt2,
        "hf-internal-testing/tiny-random-gptj": gptj,
        "patrickvonplaten/t5-tiny-random": t5,
        "hf-internal-testing/tiny-albert": albert,
        "hf-internal-testing/tiny-bert": bert,
        "sshleifer/tiny-distilroberta-base": roberta,
        **{
            f"trl-internal-testing/tiny-{kind}-2.5": functools.partial(
                getattr(transformers, kind), qwen2_config
            )
            for kind in ("Qwen2ForCausalLM", "Qwen2ForSequenceClassification")
        },
        "gpt2": gpt2,
        "apple/mobilevit-xx-small": vision,
        "peft-internal-testing/tiny-random-qwen-1.5-MoE": experts,
    }


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
