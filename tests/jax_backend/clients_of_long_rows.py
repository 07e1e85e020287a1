"""Trains a language model by each client, pairs of devices sharing rows; prints the losses as JSON.

python -m tests.jax_backend.clients_of_long_rows [CLIENT ...]

accelerate and transformers are told by their own `ParallelismConfig`, Lightning by DeepSpeed's key.
The "keyed" former two are told by that key alone.
"""

import json
import os
import sys
import tempfile
from typing import Any

import torch

from tests.jax_backend.clients import LR, MICRO, plain

STEPS, ROWS, LENGTH, WORDS, SHARED = 4, 8, 32, 64, 2
CONFIG: dict[str, Any] = {
    MICRO: ROWS,
    "train_batch_size": "auto",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2},
    "spmd": {"min_shard_elements": 64},
}

KEYED = CONFIG | {"sequence_parallel_size": SHARED}


def model() -> Any:
    """A causal language model of 8 heads."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def rows() -> list[dict[str, torch.Tensor]]:
    """The data of all steps, in their order; each row has as many labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (STEPS * ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :5] = -100
    places = torch.arange(LENGTH)
    return [
        {"input_ids": row, "position_ids": places, "labels": known}
        for row, known in zip(ids, labels, strict=True)
    ]


def batches() -> Any:
    return torch.utils.data.DataLoader(rows(), batch_size=ROWS)  # pyrefly: ignore[bad-argument-type]


def shared_rows() -> Any:
    from accelerate.utils import ParallelismConfig
    from accelerate.utils.dataclasses import DeepSpeedSequenceParallelConfig

    return ParallelismConfig(
        sp_size=SHARED,
        sp_backend="deepspeed",
        # As for eight of DeepSpeed's ranks.
        dp_shard_size=8 // SHARED,
        sp_handler=DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        ),
    )


def require_axes(engine: Any) -> None:
    assert dict(engine.mesh.spec.axes) == {"fsdp": 8 // SHARED, "sequence": SHARED}
    assert engine.train_batch_size() == ROWS


def with_trainer(*, keyed: bool = False) -> list[float]:
    """By transformers' Trainer, in the order of the rows."""
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows())  # pyrefly: ignore[bad-argument-type]

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, deepspeed=KEYED if keyed else CONFIG,
            per_device_train_batch_size=ROWS, per_device_eval_batch_size=ROWS,
            num_train_epochs=1, learning_rate=LR,
            lr_scheduler_type="constant", logging_steps=1, report_to=[], max_grad_norm=0.0,
            save_strategy="no", disable_tqdm=True, optim="adamw_torch", remove_unused_columns=False,
            parallelism_config=None if keyed else shared_rows(),
        )  # fmt: skip
        found = InOrder(model(), arguments, train_dataset=rows(), eval_dataset=rows()[:11])
        found.train()
        assert found.evaluate()["eval_loss"] > 0
    require_axes(found.deepspeed)
    assert (found.state.global_step, found.state.max_steps) == (STEPS, STEPS)
    return [entry["loss"] for entry in found.state.log_history if "loss" in entry]


def with_accelerate() -> list[float]:
    """By the loop of accelerate's guide to sequence parallelism."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState
    from deepspeed.utils import groups

    # transformers' Trainer has made one of its own, with another plugin.
    AcceleratorState._reset_state(reset_partial_state=True)
    told = shared_rows()
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG), parallelism_config=told
    )
    module, losses = model(), []
    adam = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0)
    engine, adam, loader = accelerator.prepare(module, adam, batches())
    require_axes(engine)
    assert len(loader) == STEPS
    group, gather = (
        groups._get_sequence_parallel_group(),
        torch.distributed.nn.functional.all_gather,
    )
    for batch in loader:
        adam.zero_grad()
        shift_labels, outputs = batch["shift_labels"], engine(**batch)
        loss = accelerator.unwrap_model(engine).loss_function(
            logits=outputs.logits, labels=None, shift_labels=shift_labels, vocab_size=WORDS
        )
        of_each = gather(loss, group=group)
        tokens: Any = gather((shift_labels != -100).view(-1).sum(), group=group)
        total = sum(of_each[i] * tokens[i] for i in range(told.sp_size) if tokens[i] > 0)
        loss = total / max(sum(tokens), 1)
        accelerator.backward(loss)
        adam.step()
        losses.append(loss.item())
    return losses


def with_keyed_accelerate() -> list[float]:
    """By accelerate's plain loop, whose config has DeepSpeed's key."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=KEYED))
    module, losses = model(), []
    adam = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0)
    engine, adam, loader = accelerator.prepare(module, adam, batches())
    require_axes(engine)
    assert len(loader) == STEPS
    for batch in loader:
        adam.zero_grad()
        loss = engine(**batch).loss
        accelerator.backward(loss)
        adam.step()
        losses.append(loss.item())
    return losses


def with_lightning() -> list[float]:
    """By Lightning's Trainer, with DeepSpeed's key."""
    import lightning

    from spmdzero.integrations.lightning import SpmdZeroStrategy

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = model(), list[float]()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.losses.append(outputs["loss"].item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0)

    module = Lit()
    config = {"sequence_parallel_size": SHARED, "zero_optimization": {"stage": 2}}
    trainer = lightning.Trainer(
        accelerator="auto", strategy=SpmdZeroStrategy(config=config), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, batches())
    require_axes(trainer.model)
    return module.losses


def trained(*clients: str) -> dict[str, list[float]]:
    """The losses in torch alone, and by each of these clients."""
    from spmdzero.integrations import install

    install()
    by = {
        "trainer": with_trainer,
        "accelerate": with_accelerate,
        "lightning": with_lightning,
        "keyed trainer": lambda: with_trainer(keyed=True),
        "keyed accelerate": with_keyed_accelerate,
    }
    found = {client: by[client]() for client in clients or by}
    return {"plain": plain(model(), batches())} | found


def main(*clients: str) -> None:
    os.environ.pop("USE_TORCH_XLA", None)
    print(json.dumps(trained(*clients)))


if __name__ == "__main__":
    main(*sys.argv[1:])
