"""A transformers Trainer script, the same lines under plain torch, real DeepSpeed and spmdzero.

`python -m tests.integrations.live_trainer ROLES "[order, ...]"`: said and printed as in
`accelerate_loop`, whose model and data it trains.
"""

import json
import os
import sys
import tempfile
from typing import Any

from tests.integrations.accelerate_loop import (
    LR,
    WARMUP,
    data_of,
    model_of,
    report,
)


def main() -> None:
    report(sys.argv[1].split(","), json.loads(sys.argv[2]), run)


def config_of(order: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config whose values are Trainer's, as transformers' documentation shows it."""
    optimizer = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    schedule = dict.fromkeys(
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
    )
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": order["stage"], "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "bf16": {"enabled": "auto"},
    }


def run(role: str, order: dict[str, Any]) -> dict[str, Any]:
    """What one run logged."""
    from transformers import Trainer, TrainingArguments, training_args

    if role == "deepspeed":
        # Trainer asks for a GPU that has bf16; torch computes it on any CPU.
        training_args.is_torch_bf16_gpu_available = lambda: True
    ranks = int(os.environ["WORLD_SIZE"]) if role == "deepspeed" else 1
    data = data_of(order["rows"] * order["steps"] * order["gas"], masked=order["masked"])
    chosen = {"use_cpu": True} if role == "plain" else {"deepspeed": config_of(order)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=order["rows"] // ranks,
            gradient_accumulation_steps=order["gas"],
            max_steps=order["steps"],
            learning_rate=LR,
            warmup_steps=WARMUP,
            bf16=order["precision"] == "bf16",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **chosen,
        )
        trainer = Trainer(model=model_of(order), args=arguments, train_dataset=data)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logged],
        "norms": [entry["grad_norm"] for entry in logged],
        "lr": [entry["learning_rate"] for entry in logged],
    }


if __name__ == "__main__":
    main()
