"""Fine-tunes a GPT-2 on the Python standard library's source, by Hugging Face's Trainer.

    python examples/finetune_gpt2.py                      a small GPT-2 from its config
    python examples/finetune_gpt2.py --model FOLDER       one that `save_pretrained` wrote

Without a TPU it runs on 8 virtual CPU devices. On a TPU VM the same command runs on the chips.
"""

import argparse
import math
import os
from pathlib import Path

from spmdzero.integrations import install

# From here on `deepspeed` is spmdzero: before transformers is imported, which looks for it.
install()

from source_text import SourceText, Windows  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils.data import Dataset, Subset  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

HERE = Path(__file__).parent
WINDOW, VOCABULARY = 64, 1024
PROMPT = "import os\n\ndef "


class Rows(Dataset[dict[str, Tensor]]):
    """Windows of a text as Trainer wants them; the model shifts the labels."""

    def __init__(self, tokens: Tensor) -> None:
        self.windows = Windows(tokens, WINDOW)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, _ = self.windows[index]
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    options = parse_arguments()
    # Only the CPU reads the count; a TPU knows how many chips it has.
    os.environ.setdefault("CPU_NUM_DEVICES", "8")
    # Several hosts have to build the same model.
    set_seed(0)
    text = SourceText.read(vocabulary=VOCABULARY)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=text.tokenizer._tokenizer)
    model = GPT2LMHeadModel.from_pretrained(options.model) if options.model else small_gpt2()
    arguments = TrainingArguments(
        output_dir=str(options.out),
        deepspeed=str(HERE / "ds_config_auto.json"),
        per_device_train_batch_size=32,  # of this process: its devices share them
        per_device_eval_batch_size=32,
        max_steps=options.steps,
        learning_rate=3e-3,
        warmup_steps=options.steps // 10,
        lr_scheduler_type="cosine",
        logging_steps=20,  # each log reads from the devices, and waits for them
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        save_strategy="steps",
        save_steps=options.steps // 2,
        save_total_limit=1,
        report_to=[],
    )
    held_out = Rows(text.held_out)
    stride = len(held_out) // 250
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(text.trained),
        eval_dataset=Subset(held_out, range(0, 250 * stride, stride)),
        processing_class=tokenizer,
        data_collator=default_data_collator,  # nothing is padded
    )
    trainer.train(resume_from_checkpoint=options.resume)
    loss = trainer.evaluate()["eval_loss"]
    print(f"loss on files that it wasn't trained on: {loss:.2f} nats a token, of {uniform():.2f}")
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    tokens = trainer.model.generate(prompt, max_new_tokens=20, do_sample=False)
    print(repr(tokenizer.decode(tokens[0])))
    trainer.save_model(str(options.out / "model"))
    print(f"GPT2LMHeadModel.from_pretrained({str(options.out / 'model')!r}) reads it anywhere")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a pretrained GPT-2 with this tokenizer")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("out/gpt2"), help="checkpoints, the model")
    parser.add_argument("--resume", help="folder of a checkpoint to go on from")
    return parser.parse_args()


def small_gpt2() -> GPT2LMHeadModel:
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 128, "n_positions": 2 * WINDOW}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, pad_token_id=0, **shape)
    )


def uniform() -> float:
    """The loss of the uniform guess."""
    return math.log(VOCABULARY)


if __name__ == "__main__":
    main()
