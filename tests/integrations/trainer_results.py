"""Scripts that use what Trainer has trained: predictions, text, checkpoints, adapters, TRL."""

from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    EarlyStoppingCallback,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from tests.integrations.trainer_setup import (
    LENGTH,
    ROWS,
    VOCABULARY,
    Side,
    gpt2,
    squares,
    texts,
    train,
)


def predict(side: Side) -> dict[str, Any]:
    """Predictions after training, of a data set with an uneven last batch and of one row."""
    trainer = Trainer(gpt2(), side.arguments(max_steps=3), train_dataset=texts())
    found = train(trainer)
    for rows in (27, 1):
        output = trainer.predict(texts(rows))
        assert output.predictions.shape == (rows, LENGTH, VOCABULARY)
        found[f"test_loss {rows}"] = output.metrics["test_loss"]
        found[f"sums {rows}"] = np.abs(output.predictions).sum((1, 2)).astype(float).tolist()
    without_labels = [{"input_ids": row["input_ids"]} for row in texts(20)]
    output = trainer.predict(without_labels)
    found["sums without labels"] = np.abs(output.predictions).sum((1, 2)).astype(float).tolist()
    return found


def generate(side: Side) -> dict[str, Any]:
    """Greedy tokens of the model in training and after it."""
    trainer = Trainer(gpt2(), side.arguments(max_steps=10), train_dataset=texts())
    prompts = torch.arange(12).reshape(3, 4)
    found = train(trainer)
    tokens = trainer.model.generate(prompts, max_new_tokens=8, do_sample=False)
    assert tokens.device.type == "cpu"
    return found | {"tokens": tokens.tolist(), "training": trainer.model.training}


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def seq2seq(side: Side) -> dict[str, Any]:
    """Seq2SeqTrainer measures on what the model generates."""

    def exact(prediction: Any) -> dict[str, float]:
        return {"tokens": float(np.abs(prediction.predictions).sum())}

    arguments = side.arguments(
        kind=Seq2SeqTrainingArguments,
        max_steps=10,
        eval_strategy="steps",
        eval_steps=5,
        predict_with_generate=True,
        generation_max_length=12,
    )
    trainer = Seq2SeqTrainer(
        t5(), arguments, train_dataset=texts(), eval_dataset=texts(20), compute_metrics=exact
    )
    return train(trainer)


def lora(side: Side) -> dict[str, Any]:
    """Adapters by peft on a frozen GPT-2, saved and loaded by peft."""
    shape = LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = get_peft_model(gpt2(), shape)
    trainer = Trainer(
        model, side.arguments(learning_rate=1e-2), train_dataset=texts(), eval_dataset=texts(27)
    )
    found = train(trainer)
    found["after"] = trainer.evaluate()["eval_loss"]
    prompts = torch.arange(12).reshape(3, 4)
    found["tokens"] = trainer.model.generate(
        input_ids=prompts, max_new_tokens=8, do_sample=False
    ).tolist()
    trainer.save_model(str(side.folder / "adapter"))
    return found


def saved(side: Side) -> dict[str, Any]:
    """A trained model in two folders, by `save_model` and by `save_pretrained`."""
    trainer = Trainer(gpt2(), side.arguments(max_steps=5), train_dataset=texts())
    found = train(trainer, ended=True)
    trainer.save_model(str(side.folder / "save_model"))
    trainer.model.save_pretrained(str(side.folder / "save_pretrained"))
    return found


def resumed(side: Side) -> dict[str, Any]:
    """Ten steps with dropout, saved each fifth, and the last five again from the checkpoint."""

    def trainer(folder: str) -> Trainer:
        model = gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
        output = str(side.folder / folder)
        arguments = side.arguments(
            "scheduler", output_dir=output, max_steps=10, save_strategy="steps", save_steps=5
        )
        return Trainer(model, arguments, train_dataset=texts(7 * ROWS + 10, padded=True))

    straight = train(trainer("straight"), ended=True)
    checkpoint = str(side.folder / "straight" / "checkpoint-5")
    again = train(trainer("again"), resume=checkpoint, ended=True)
    return {"straight": straight, "again": again}


def resumed_client(side: Side) -> dict[str, Any]:
    """The same with Trainer's own optimizer and schedule, without dropout."""

    def trainer(folder: str) -> Trainer:
        arguments = side.arguments(
            output_dir=str(side.folder / folder),
            max_steps=10,
            weight_decay=0.1,
            save_strategy="steps",
            save_steps=5,
        )
        return Trainer(gpt2(), arguments, train_dataset=texts(padded=True))

    straight = train(trainer("client"), ended=True)
    checkpoint = str(side.folder / "client" / "checkpoint-5")
    again = train(trainer("client again"), resume=checkpoint, ended=True)
    return {"straight": straight, "again": again}


def resumed_here(side: Side) -> dict[str, Any]:
    """The second half of `resumed_client`, from the checkpoint that another process left."""
    arguments = side.arguments(output_dir=str(side.folder / "here"), max_steps=10, weight_decay=0.1)
    trainer = Trainer(gpt2(), arguments, train_dataset=texts(padded=True))
    return train(trainer, resume=str(side.folder / "client" / "checkpoint-5"), ended=True)


def best(side: Side) -> dict[str, Any]:
    """The best of the evaluated models is loaded at the end: the first, by a rising metric."""

    evaluated: list[float] = []

    def worse_each_time(prediction: Any) -> dict[str, float]:
        evaluated.append(float(np.abs(prediction.predictions).sum()))
        return {"rank": float(len(evaluated))}

    arguments = side.arguments(
        output_dir=str(side.folder / "best"),
        max_steps=9,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="rank",
        greater_is_better=False,
    )
    trainer = Trainer(
        gpt2(),
        arguments,
        train_dataset=texts(),
        eval_dataset=texts(27),
        compute_metrics=worse_each_time,
    )
    found = train(trainer, ended=True)
    found["sums"] = evaluated
    found["best"] = trainer.state.best_model_checkpoint
    trainer.evaluate()
    return found


def stopped_early(side: Side) -> dict[str, Any]:
    """Early stopping: no evaluation is better than the first by 100."""
    arguments = side.arguments(
        output_dir=str(side.folder / "stopped"),
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
    )
    stopping = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=100.0)
    trainer = Trainer(
        gpt2(),
        arguments,
        train_dataset=texts(),
        eval_dataset=texts(27),
        callbacks=[stopping],
    )
    return train(trainer)


def loaded(side: Side) -> dict[str, Any]:
    """What plain transformers reads from the folders that `saved` and `lora` wrote."""
    found = {}
    rows = torch.stack([row["input_ids"] for row in texts(27)])
    for name in ("save_model", "save_pretrained"):
        model = GPT2LMHeadModel.from_pretrained(str(side.folder / name))
        with torch.no_grad():
            found[name] = model(input_ids=rows, labels=rows).loss.item()
        found[f"{name} squares"] = squares(model)
    adapted = PeftModel.from_pretrained(gpt2(), str(side.folder / "adapter"))
    with torch.no_grad():
        found["adapter"] = adapted(input_ids=rows, labels=rows).loss.item()
    return found
