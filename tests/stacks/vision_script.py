"""Trains a vision-language model with transformers' Trainer, as a script of one's own would.

python vision_script.py MODEL DATA [arguments of TrainingArguments]
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """The rows of a folder with `train.jsonl` and pictures."""

    def __init__(self, folder: Path, part: str) -> None:
        lines = (folder / f"{part}.jsonl").read_text().splitlines()
        self._folder, self._rows = folder, [json.loads(line) for line in lines]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        return row | {"images": [Image.open(self._folder / name) for name in row["images"]]}


def main() -> None:
    model, data, *words = sys.argv[1:]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    args.remove_unused_columns = False
    processor = AutoProcessor.from_pretrained(model)
    tokenizer = processor.tokenizer

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        texts = [processor.apply_chat_template(row["messages"]) for row in rows]
        images = [image for row in rows for image in row["images"]] or None
        batch = processor(text=texts, images=images, padding=True, return_tensors="pt")
        ids = batch["input_ids"]
        answered = (ids == tokenizer.convert_tokens_to_ids("assistant")).cumsum(1) > 0
        labels = ids.where(answered & (ids != tokenizer.pad_token_id), -100)
        return dict(batch) | {"labels": labels}

    trainer = Trainer(
        model=AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32),
        args=args,
        data_collator=collate,
        train_dataset=Rows(Path(data), "train"),
        eval_dataset=Rows(Path(data), "test"),
        processing_class=processor,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(str(Path(args.output_dir) / "final"))


if __name__ == "__main__":
    main()
