"""Scripts that use Hugging Face's Trainer, each a function of the side that it runs on."""

import math
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
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
    CONFIGS,
    LENGTH,
    ROWS,
    VOCABULARY,
    Side,
    bert,
    classes,
    gpt2,
    squares,
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


def accumulation(side: Side) -> dict[str, Any]:
    """Four micro-batches a step; an epoch of ten, so that each third step has two."""
    arguments = side.arguments(gradient_accumulation_steps=4)
    return train(Trainer(gpt2(), arguments, train_dataset=texts(10 * ROWS, padded=True)))


def mean_accumulation(side: Side) -> dict[str, Any]:
    """The same, where the model returns the mean and Trainer divides by the micro-batches."""
    model = gpt2()
    model.accepts_loss_kwargs = False
    arguments = side.arguments(gradient_accumulation_steps=4)
    return train(Trainer(model, arguments, train_dataset=texts(10 * ROWS)))


def padded(side: Side) -> dict[str, Any]:
    """Labels that are padded unevenly: the devices have different numbers of them."""
    return train(Trainer(gpt2(), side.arguments(), train_dataset=texts(padded=True)))


def stage1(side: Side) -> dict[str, Any]:
    """ZeRO-1."""
    return train(Trainer(gpt2(), side.arguments("stage 1"), train_dataset=texts(padded=True)))


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


def gradient_checkpointing(side: Side) -> dict[str, Any]:
    """Layers are computed again in the backward."""
    arguments = side.arguments(gradient_checkpointing=True)
    return train(Trainer(gpt2(), arguments, train_dataset=texts()))


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
    from peft import PeftModel

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


def sft(side: Side) -> dict[str, Any]:
    """TRL's SFTTrainer on text in memory, its tokenizer made in memory."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    names = ["<pad>", "<eos>", *(f"w{i}" for i in range(VOCABULARY - 2))]
    words = Tokenizer(
        models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    lengths = torch.randint(4, LENGTH - 1, (256,), generator=torch.Generator().manual_seed(2))
    lines = [
        " ".join(f"w{int(token) % (VOCABULARY - 2)}" for token in row["input_ids"][:length])
        for row, length in zip(texts(256), lengths, strict=True)
    ]
    arguments = side.arguments(
        kind=SFTConfig,
        max_steps=10,
        bf16=False,
        max_length=LENGTH,
        gradient_checkpointing=False,
        pad_to_multiple_of=LENGTH,
    )
    trainer = SFTTrainer(
        gpt2(),
        arguments,
        train_dataset=Dataset.from_dict({"text": lines}),
        processing_class=tokenizer,
    )
    found = train(trainer)
    steps = [entry for entry in trainer.state.log_history if "entropy" in entry]
    return found | {
        key: [step[key] for step in steps] for key in ("entropy", "mean_token_accuracy")
    }


def zero3(side: Side) -> dict[str, Any]:
    """Refused: sharded parameters."""
    config = CONFIGS["client"] | {"zero_optimization": {"stage": 3}}
    return train(Trainer(gpt2(), side.arguments(config), train_dataset=texts()))


def mismatched(side: Side) -> dict[str, Any]:
    """Refused by transformers: a value that is neither "auto" nor that of the arguments."""
    config = CONFIGS["client"] | {"gradient_clipping": 0.5}
    return train(Trainer(gpt2(), side.arguments(config), train_dataset=texts()))


def unshared_rows(side: Side) -> dict[str, Any]:
    """Refused: twelve rows on eight devices."""
    arguments = side.arguments(per_device_train_batch_size=12)
    return train(Trainer(gpt2(), arguments, train_dataset=texts()))


def trained_twice(side: Side) -> dict[str, Any]:
    """Refused: a second `train` of one Trainer, which DeepSpeed's engine doesn't outlive either."""
    trainer = Trainer(gpt2(), side.arguments(max_steps=1), train_dataset=texts())
    train(trainer)
    return train(trainer)


def evaluated_first(side: Side) -> dict[str, Any]:
    """Refused by transformers: there is no engine yet."""
    return Trainer(gpt2(), side.arguments(), eval_dataset=texts(27)).evaluate()


def auto_find_batch_size(side: Side) -> dict[str, Any]:
    """Refused."""
    arguments = side.arguments(auto_find_batch_size=True)
    return train(Trainer(gpt2(), arguments, train_dataset=texts()))


def cast_to_evaluate(side: Side) -> dict[str, Any]:
    """Refused: fp32 parameters cast to bf16 for an evaluation."""
    config = {key: value for key, value in CONFIGS["client"].items() if key != "bf16"}
    arguments = side.arguments(config, max_steps=1, bf16_full_eval=True)
    trainer = Trainer(gpt2(), arguments, train_dataset=texts(), eval_dataset=texts(27))
    train(trainer)
    return trainer.evaluate()


def adafactor(side: Side) -> dict[str, Any]:
    """Refused: an optimizer whose update needs whole rows and columns."""
    arguments = side.arguments(optim="adafactor")
    return train(Trainer(gpt2(), arguments, train_dataset=texts()))
