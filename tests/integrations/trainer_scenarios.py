"""Scripts that train by Hugging Face's Trainer, each a function of the side that it runs on."""

import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import Trainer

from spmdzero.inspect import peak_temporary_bytes
from tests.integrations.trainer_setup import (
    CONFIGS,
    ROWS,
    VOCABULARY,
    Side,
    bert,
    classes,
    gpt2,
    texts,
    train,
)


def _accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    assert isinstance(logits, np.ndarray)
    assert logits.shape == (*labels.shape, VOCABULARY)
    right = logits[:, :-1].argmax(-1) == labels[:, 1:]
    return {"accuracy": float(right.mean()), "mean_logit": float(np.abs(logits).mean())}


def main(side: Side) -> dict[str, Any]:
    """The main path: own optimizer, evaluation in the middle with an uneven last batch."""
    arguments = side.arguments(
        weight_decay=0.1, logging_steps=2, eval_strategy="steps", eval_steps=10
    )
    trainer = Trainer(
        gpt2(), arguments, train_dataset=texts(), eval_dataset=texts(27), compute_metrics=_accuracy
    )
    return train(trainer, ended=True)


def short(side: Side) -> dict[str, Any]:
    """Three steps and an evaluation whose last batch is uneven."""
    arguments = side.arguments(max_steps=3, eval_strategy="steps", eval_steps=3)
    return train(Trainer(gpt2(), arguments, train_dataset=texts(), eval_dataset=texts(27)))


def accumulation(side: Side) -> dict[str, Any]:
    """Four micro-batches a step; an epoch of ten, so that each third step has two."""
    arguments = side.arguments(gradient_accumulation_steps=4)
    return train(Trainer(gpt2(), arguments, train_dataset=texts(10 * ROWS, padded=True)))


def fused_loss(side: Side) -> dict[str, Any]:
    """As `accumulation`, without logits; evaluation has them."""
    arguments = side.arguments(
        CONFIGS["client"] | {"spmd": {"fused_loss": True}},
        gradient_accumulation_steps=4, eval_strategy="steps", eval_steps=10,
    )  # fmt: skip
    trainer = Trainer(
        gpt2(),
        arguments,
        train_dataset=texts(10 * ROWS, padded=True),
        eval_dataset=texts(27, padded=True),
        compute_metrics=_accuracy,
    )
    return train(trainer)


def mean_accumulation(side: Side) -> dict[str, Any]:
    """The same, where the model returns the mean and Trainer divides by the micro-batches."""
    model = gpt2()
    model.accepts_loss_kwargs = False
    arguments = side.arguments(gradient_accumulation_steps=4)
    return train(Trainer(model, arguments, train_dataset=texts(10 * ROWS)))


def padded(side: Side) -> dict[str, Any]:
    """Labels that are padded unevenly: the devices have different numbers of them."""
    return train(Trainer(gpt2(), side.arguments(), train_dataset=texts(padded=True)))


def lengths(side: Side) -> dict[str, Any]:
    """Batches that a collator pads to their longest row, of some eight lengths."""

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        longest = max(int(row["attention_mask"].sum()) for row in rows)
        return {key: torch.stack([row[key][:longest] for row in rows]) for key in rows[0]}

    rows = texts(8 * ROWS, padded=True, least=12, most=24)
    arguments = side.arguments(max_steps=8, eval_strategy="steps", eval_steps=8)
    trainer = Trainer(
        gpt2(n_positions=64),
        arguments,
        data_collator=collate,
        train_dataset=rows,
        eval_dataset=texts(27, padded=True),
    )
    return train(trainer, ended=True)


def stage1(side: Side) -> dict[str, Any]:
    """ZeRO-1."""
    return train(Trainer(gpt2(), side.arguments("stage 1"), train_dataset=texts(padded=True)))


def adafactor(side: Side) -> dict[str, Any]:
    """A second moment of rows and columns."""
    arguments = side.arguments(optim="adafactor")
    return train(Trainer(gpt2(), arguments, train_dataset=texts(padded=True)))


def uneven(side: Side) -> dict[str, Any]:
    """An epoch of three batches and one of ten rows, one of which the devices can't share."""
    rows = texts(3 * ROWS + 10, padded=True)
    return train(Trainer(gpt2(), side.arguments(), train_dataset=rows))


def config_optimizer(side: Side) -> dict[str, Any]:
    """AdamW of the JSON, Trainer's schedule."""
    return train(Trainer(gpt2(), side.arguments("optimizer"), train_dataset=texts()))


def config_scheduler(side: Side) -> dict[str, Any]:
    """All of it from the JSON, everything "auto"."""
    model, arguments = gpt2(), side.arguments("scheduler")
    own: tuple[Any, Any] = (None, None)
    if not side.deepspeed:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

        def warmup_decay(step: int) -> float:
            # DeepSpeed's WarmupDecayLR(total 20, warmup 2, log): steps 0 and 1 are iteration 0.
            at, total, warmup = max(step - 1, 0), 20, 2
            if at < warmup:
                return math.log(at + 1) / math.log(max(2, warmup))
            return max(0.0, (total - at) / max(1, total - warmup))

        own = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_decay)
    return train(Trainer(model, arguments, train_dataset=texts(), optimizers=own))


def logging_steps(side: Side) -> dict[str, Any]:
    """A log each fifth step."""
    return train(Trainer(gpt2(), side.arguments(logging_steps=5), train_dataset=texts()))


def nan_filter(side: Side) -> dict[str, Any]:
    """A loss that is reported as not a number for some batches, its gradient finite."""

    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        bad = (outputs["logits"][:, 0, 0].detach() > -1e9).sum() * 0.0
        bad = torch.where((labels[:, 0] == 5).any(), bad / 0.0, bad)
        return _next_token_loss(outputs, labels, num_items_in_batch) + bad

    arguments = side.arguments(logging_steps=5)
    return train(Trainer(gpt2(), arguments, train_dataset=texts(), compute_loss_func=loss_of))


def _next_token_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, wanted = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch


def label_smoothing(side: Side) -> dict[str, Any]:
    """A loss that Trainer computes from the logits."""
    arguments = side.arguments(label_smoothing_factor=0.1)
    return train(Trainer(gpt2(), arguments, train_dataset=texts(padded=True)))


def compute_loss_func(side: Side) -> dict[str, Any]:
    """A loss that the user's function computes from the logits, accumulated."""
    arguments = side.arguments(gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=10)
    trainer = Trainer(
        gpt2(),
        arguments,
        train_dataset=texts(padded=True),
        eval_dataset=texts(27, padded=True),
        compute_loss_func=_next_token_loss,
    )
    return train(trainer)


def classification(side: Side) -> dict[str, Any]:
    """BERT with a label for each row, and a last batch of one row."""
    arguments = side.arguments(eval_strategy="steps", eval_steps=10)
    rows = classes(3 * ROWS + 1)
    return train(Trainer(bert(), arguments, train_dataset=rows, eval_dataset=classes(27)))


def frozen(side: Side) -> dict[str, Any]:
    """Embeddings and the first layer don't train."""
    model = gpt2()
    for parameter in [*model.transformer.wte.parameters(), *model.transformer.h[0].parameters()]:
        parameter.requires_grad_(False)
    return train(Trainer(model, side.arguments(), train_dataset=texts()), ended=True)


def checkpointed(side: Side) -> dict[str, Any]:
    """With and without checkpointing: bytes of temporary values, and how forwards ran."""
    found: dict[str, Any] = {}
    rows = texts(512)
    for name, on in (("without", False), ("with", True)):
        # Of fewer rows the gradients take most of the memory.
        arguments = side.arguments(
            max_steps=5, gradient_checkpointing=on, per_device_train_batch_size=8 * ROWS
        )
        trainer = Trainer(gpt2(n_layer=6, resid_pdrop=0.1), arguments, train_dataset=rows)
        noted = train(trainer)
        engine = trainer.model_wrapped
        found[name] = {"loss": noted["loss"], "traced": engine.capture.traced}
        hlo: list[str] = []
        with engine.observe(lambda graph, hlo=hlo: hlo.append(graph.hlo())):
            batch = {key: torch.stack([row[key] for row in rows[: 8 * ROWS]]) for key in rows[0]}
            engine.backward(engine(**batch)["loss"])
            engine.step()
        found[name]["bytes"] = peak_temporary_bytes(hlo[-1])
    return found


def gradient_checkpointing(side: Side) -> dict[str, Any]:
    """Layers are computed again in the backward."""
    arguments = side.arguments(gradient_checkpointing=True)
    return train(Trainer(gpt2(), arguments, train_dataset=texts()))
