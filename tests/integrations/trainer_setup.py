"""What runs of Hugging Face's Trainer share: models, data, arguments, and what is noted of a run.

Imported after `install()`, because transformers looks for deepspeed when it is imported.
"""

import dataclasses
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

VOCABULARY, LENGTH = 128, 32
# Of all processes together.
ROWS = 16
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
_BATCHES = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
_ADAMW = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
_DECAY = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
CONFIGS: dict[str, dict[str, Any]] = {
    # Trainer's own optimizer and schedule.
    "client": _BATCHES,
    "optimizer": _BATCHES | {"optimizer": {"type": "AdamW", "params": _ADAMW}},
}
CONFIGS["scheduler"] = CONFIGS["optimizer"] | {
    "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(_DECAY, "auto")}
}
CONFIGS["stage 1"] = _BATCHES | {"zero_optimization": {"stage": 1}}


@dataclasses.dataclass(frozen=True)
class Side:
    """Where a scenario runs: under DeepSpeed's JSON, or as plain torch on the CPU."""

    deepspeed: bool
    folder: Path

    def arguments(
        self, config: Any = "client", kind: type = TrainingArguments, **changes: Any
    ) -> TrainingArguments:
        """Arguments of 20 steps of 16 rows, each step logged, and of this side."""
        told = CONFIGS[config] if isinstance(config, str) else config
        where = {"deepspeed": told} if self.deepspeed else {"use_cpu": True}
        usual: dict[str, Any] = {
            "output_dir": str(self.folder / "out"),
            "per_device_train_batch_size": ROWS // PROCESSES,
            "per_device_eval_batch_size": ROWS // PROCESSES,
            "max_steps": 20,
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "optim": "adamw_torch",
        }
        return kind(**(usual | where | changes))


def gpt2(
    seed: int = 0, *, kind: type[Any] = GPT2LMHeadModel, **changes: Any
) -> GPT2LMHeadModel | Any:
    """A GPT-2 of two layers without dropout."""
    torch.manual_seed(seed)
    usual = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": LENGTH}
    # Some rows begin or end with the token of padding, and transformers asks which.
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 5}
    return kind(GPT2Config(**(usual | shape | tokens | changes)))


def bert() -> BertForSequenceClassification:
    """A BERT of two layers without dropout, of three classes."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=128, max_position_embeddings=LENGTH, num_labels=3,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def texts(
    rows: int = 512, *, padded: bool = False, least: int = 4, most: int = LENGTH
) -> list[dict[str, torch.Tensor]]:
    """Rows of a language: each token is the one before it plus one, with one mistake in eight.

    Padded rows end after `least` to `most` tokens, the labels -100 from there.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (rows, 1), generator=generator) + torch.arange(LENGTH)
    mistakes = torch.rand(rows, LENGTH, generator=generator) < 0.125
    ids = torch.where(mistakes, ids * 7, ids) % VOCABULARY
    if not padded:
        return [{"input_ids": row, "labels": row} for row in ids]
    ends = torch.randint(least, most + 1, (rows, 1), generator=generator)
    seen = torch.arange(LENGTH) < ends
    return [
        {"input_ids": row, "attention_mask": mask.long(), "labels": row.masked_fill(~mask, -100)}
        for row, mask in zip(ids, seen, strict=True)
    ]


def classes(rows: int = 512) -> list[dict[str, torch.Tensor]]:
    """Rows with one of three classes, which their first token tells."""
    return [
        {"input_ids": row["input_ids"], "labels": row["input_ids"][0] % 3} for row in texts(rows)
    ]


class Noted(TrainerCallback):
    """Transfers to the host and compilations so far at the end of each step, before it is logged.

    Those of evaluations and checkpoints are left out.
    """

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.compiled: list[int] = []
        self._apart = (0, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes both."""
        reads, compiled = _counted()
        self.reads.append(reads - self._apart[0])
        self.compiled.append(compiled - self._apart[1])

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leaves out what came after the step, here and when it was saved."""
        reads, compiled = _counted()
        if self.reads:
            self._apart = reads - self.reads[-1], compiled - self.compiled[-1]

    on_save = on_evaluate


def _counted() -> tuple[int, int]:
    from spmdzero.backend import counters

    return counters.host_reads(), counters.compiled()[0]


def train(trainer: Trainer, *, resume: str | None = None, ended: bool = False) -> dict[str, Any]:
    """Trains, and says what was logged; `ended` adds the sums of the parameters."""
    # A plain run doesn't import it.
    noted, ours = Noted(), "spmdzero" in sys.modules
    if ours:
        trainer.add_callback(noted)
    result = trainer.train(resume_from_checkpoint=resume)
    found = logged(trainer) | {"train_loss": result.training_loss}
    if ours:
        found |= {"reads": noted.reads, "compiled": noted.compiled}
    if ended:
        found |= {"weights": weights(trainer.model), "squares": squares(trainer.model)}
    return found


def logged(trainer: Trainer) -> dict[str, Any]:
    """Losses, norms, learning rates and evaluations of the log."""
    history = trainer.state.log_history
    steps = [entry for entry in history if "loss" in entry]
    evaluations = [
        {key: entry[key] for key in entry if key.startswith("eval_") and _is_number(key)}
        for entry in history
        if "eval_loss" in entry
    ]
    found = {key: [s[key] for s in steps] for key in ("loss", "grad_norm", "learning_rate")}
    assert all(math.isfinite(number) for numbers in found.values() for number in numbers), found
    return found | {"eval": evaluations}


def _is_number(key: str) -> bool:
    return not key.endswith(("_runtime", "_per_second", "_preparation_time"))


def weights(model: torch.nn.Module) -> dict[str, float]:
    """A number of each parameter that its least bit changes."""
    return {
        name: float(numbers @ torch.arange(1.0, numbers.numel() + 1, dtype=torch.float64))
        for name, value in model.named_parameters()
        for numbers in [value.detach().cpu().double().flatten()]
    }


def squares(model: torch.nn.Module) -> dict[str, float]:
    """The norm of each matrix; biases are too small, and begin with 0."""
    return {
        name: float(value.detach().cpu().double().norm())
        for name, value in model.named_parameters()
        if value.dim() > 1
    }
