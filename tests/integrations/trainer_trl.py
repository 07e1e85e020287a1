"""Scripts that train by TRL's trainers, each a function of the side that it runs on."""

from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from tests.integrations.trainer_setup import LENGTH, VOCABULARY, Side, gpt2, texts, train

_USUAL: dict[str, Any] = {
    "max_steps": 10,
    "bf16": False,
    "max_length": LENGTH,
    "gradient_checkpointing": False,
    "pad_to_multiple_of": LENGTH,
}

# Beside what any Trainer logs.
DPO = ("rewards/margins", "rewards/accuracies", "logps/chosen", "logits/rejected", "entropy")


def _tokenizer() -> PreTrainedTokenizerFast:
    """Of as many words as the models know, made in memory."""
    names = ["<pad>", "<eos>", *(f"w{i}" for i in range(VOCABULARY - 2))]
    words = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def _lines(rows: int, *, seed: int, least: int = 4, most: int = LENGTH - 1) -> list[str]:
    """Texts of `least` to `most` - 1 words."""
    lengths = torch.randint(least, most, (rows,), generator=torch.Generator().manual_seed(seed))
    return [
        " ".join(f"w{int(token) % (VOCABULARY - 2)}" for token in row["input_ids"][:length])
        for row, length in zip(texts(rows), lengths, strict=True)
    ]


def _preferences(rows: int) -> Dataset:
    """A prompt, an answer that goes on with it and one that goes back, of different lengths."""
    prompts = _lines(rows, seed=2, most=8)
    chosen = _lines(rows, seed=3, most=14)
    rejected = [" ".join(reversed(line.split())) for line in _lines(rows, seed=4, most=20)]
    return Dataset.from_dict(
        {
            "prompt": [f"{line} " for line in prompts],
            "chosen": chosen,
            "rejected": rejected,
        }
    )


def _noted(trainer: Trainer, *keys: str) -> dict[str, Any]:
    found = train(trainer, ended=True)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return found | {key: [step[key] for step in steps] for key in keys}


def sft(side: Side) -> dict[str, Any]:
    """SFTTrainer on text."""
    trainer = SFTTrainer(
        gpt2(),
        side.arguments(kind=SFTConfig, **_USUAL),
        train_dataset=Dataset.from_dict({"text": _lines(256, seed=2)}),
        processing_class=_tokenizer(),
    )
    return _noted(trainer, "entropy", "mean_token_accuracy")


def sft_packed(side: Side) -> dict[str, Any]:
    """SFTTrainer on texts that are packed into rows, each of which sees itself alone."""
    trainer = SFTTrainer(
        gpt2(),
        side.arguments(kind=SFTConfig, packing=True, packing_strategy="bfd", **_USUAL),
        train_dataset=Dataset.from_dict({"text": _lines(512, seed=2)}),
        processing_class=_tokenizer(),
    )
    return _noted(trainer, "entropy", "mean_token_accuracy")


def dpo(side: Side) -> dict[str, Any]:
    """DPOTrainer: chosen and rejected rows are one batch; an epoch ends with ten pairs."""
    arguments = side.arguments(kind=DPOConfig, eval_strategy="steps", eval_steps=5, **_USUAL)
    trainer = DPOTrainer(
        gpt2(),
        gpt2(seed=1),
        arguments,
        train_dataset=_preferences(58),
        eval_dataset=_preferences(27),
        processing_class=_tokenizer(),
    )
    return _noted(trainer, *DPO)


def dpo_short(side: Side) -> dict[str, Any]:
    """The first step of it, with a learning rate."""
    arguments = side.arguments(kind=DPOConfig, **_USUAL | {"max_steps": 1, "warmup_steps": 0})
    trainer = DPOTrainer(
        gpt2(n_layer=1),
        gpt2(seed=1, n_layer=1),
        arguments,
        train_dataset=_preferences(16),
        processing_class=_tokenizer(),
    )
    return _noted(trainer, *DPO)


def dpo_precomputed(side: Side) -> dict[str, Any]:
    """The reference's log-probabilities are computed before training, by the model itself."""
    arguments = side.arguments(
        kind=DPOConfig, precompute_ref_log_probs=True, gradient_accumulation_steps=2, **_USUAL
    )
    trainer = DPOTrainer(
        gpt2(),
        args=arguments,
        train_dataset=_preferences(64),
        processing_class=_tokenizer(),
    )
    return _noted(trainer, *DPO)


def dpo_lora(side: Side) -> dict[str, Any]:
    """Adapters are trained, and the model without them is the reference."""
    torch.manual_seed(1)
    arguments = side.arguments(kind=DPOConfig, **_USUAL | {"learning_rate": 1e-2})
    trainer = DPOTrainer(
        gpt2(),
        args=arguments,
        train_dataset=_preferences(64),
        processing_class=_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"),
    )
    return _noted(trainer, *DPO)


def reward(side: Side) -> dict[str, Any]:
    """RewardTrainer: the loss compares the rewards of chosen and rejected rows."""
    arguments = side.arguments(kind=RewardConfig, eval_strategy="steps", eval_steps=5, **_USUAL)
    trainer = RewardTrainer(
        gpt2(kind=GPT2ForSequenceClassification, num_labels=1),
        arguments,
        train_dataset=_preferences(58),
        eval_dataset=_preferences(27),
        processing_class=_tokenizer(),
    )
    return _noted(trainer, "accuracy", "margin", "min_reward")


def kto(side: Side) -> dict[str, Any]:
    """KTOTrainer: answers that are wanted or not, and others that tell how far it has come."""
    pairs = _preferences(32)
    names = ("chosen", "rejected")
    lines = {
        "prompt": [prompt for prompt in pairs["prompt"] for _ in names],
        "completion": [row[name] for row in pairs for name in names],
        "label": [name == "chosen" for _ in pairs for name in names],
    }
    trainer = KTOTrainer(
        gpt2(),
        gpt2(seed=1),
        side.arguments(kind=KTOConfig, **_USUAL),
        train_dataset=Dataset.from_dict(lines),
        processing_class=_tokenizer(),
    )
    return _noted(trainer, "rewards/chosen", "rewards/rejected", "kl")
