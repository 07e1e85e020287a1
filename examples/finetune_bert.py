"""Fine-tunes a BERT to tell which package of Python's library some lines of source come from.

    python examples/finetune_bert.py

Hugging Face's Trainer with DeepSpeed's JSON: accuracy after each epoch, the best model at the end.
Without a TPU it runs on 8 virtual CPU devices. On a TPU VM the same command runs on the chips.
"""

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

from spmdzero.integrations import install

# From here on `deepspeed` is spmdzero: before transformers is imported, which looks for it.
install()

from tokenizers import ByteLevelBPETokenizer  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

HERE = Path(__file__).parent
PACKAGES = ["asyncio", "email", "multiprocessing", "unittest"]
LINES, WINDOW, VOCABULARY = 12, 64, 1024
HELD_OUT_EVERY = 5  # files


def main() -> None:
    options = parse_arguments()
    # Only the CPU reads the count; a TPU knows how many chips it has.
    os.environ.setdefault("CPU_NUM_DEVICES", "8")
    trained, held_out = read_pieces()
    tokenizer = make_tokenizer([text for text, _ in trained])
    arguments = TrainingArguments(
        output_dir=str(options.out),
        deepspeed=str(HERE / "ds_config_auto.json"),
        per_device_train_batch_size=32,  # of this process: its devices share them
        per_device_eval_batch_size=64,
        num_train_epochs=options.epochs,
        max_steps=options.steps,
        learning_rate=1e-3,
        logging_steps=20,  # each log reads from the devices, and waits for them
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=[],
    )
    trainer = Trainer(
        model=small_bert(),
        args=arguments,
        train_dataset=rows(trained, tokenizer),
        eval_dataset=rows(held_out, tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.train()
    found = trainer.evaluate()["eval_accuracy"]
    print(f"right on files that it wasn't trained on: {found:.0%}, of {1 / len(PACKAGES):.0%}")
    trainer.save_model(str(options.out / "model"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=-1, help="in place of epochs")
    parser.add_argument("--out", type=Path, default=Path("out/bert"), help="checkpoints, the model")
    return parser.parse_args()


def read_pieces() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Pieces of source, each with the index of its package: to train on, and held out."""
    trained: list[tuple[str, int]] = []
    held_out: list[tuple[str, int]] = []
    for label, package in enumerate(PACKAGES):
        paths = sorted((Path(sysconfig.get_paths()["stdlib"]) / package).glob("*.py"))
        for index, path in enumerate(paths, start=1):
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            pieces = ["".join(lines[at : at + LINES]) for at in range(0, len(lines), LINES)]
            chosen = trained if index % HELD_OUT_EVERY else held_out
            chosen.extend((piece, label) for piece in pieces if piece.strip())
    return trained, held_out


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(
        texts, vocab_size=VOCABULARY, special_tokens=["<pad>"], show_progress=False
    )
    return PreTrainedTokenizerFast(tokenizer_object=learned._tokenizer, pad_token="<pad>")


def rows(pieces: list[tuple[str, int]], tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """Token ids and labels. All rows have the same length: another one would be another program."""
    encoded = tokenizer(
        [text for text, _ in pieces], padding="max_length", truncation=True, max_length=WINDOW
    )
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, (_, label) in zip(
            encoded["input_ids"], encoded["attention_mask"], pieces, strict=True
        )
    ]


def small_bert() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=WINDOW,
            num_labels=len(PACKAGES),
            pad_token_id=0,
        )
    )


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


if __name__ == "__main__":
    main()
