"""Scripts of Trainer whose parameters rest as shards, and the same at stage 2 beside them."""

import functools
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, Trainer
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from spmdzero.backend import arrays
from tests.integrations.trainer_setup import (
    CONFIGS,
    VOCABULARY,
    Side,
    gpt2,
    squares,
    texts,
    train,
)

# Of so small a model too a matrix is to rest as shards.
SECTIONS: dict[int, dict[str, Any]] = {
    2: {"stage": 2},
    3: {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": 0,
    },
}


def config(stage: int) -> dict[str, Any]:
    """The JSON of a stage."""
    kept = {"spmd": {"min_shard_elements": 256}}
    return CONFIGS["client"] | {"zero_optimization": dict(SECTIONS[stage])} | kept


def split(model: torch.nn.Module) -> list[str]:
    """The matrices that rest as shards."""
    named = model.named_parameters()
    return [name for name, p in named if p.dim() > 1 and arrays.is_split(p)]


def whole(model: torch.nn.Module) -> list[str]:
    """The matrices that every device holds whole."""
    own = set(split(model))
    return [name for name, p in model.named_parameters() if p.dim() > 1 and name not in own]


def _trainer(side: Side, stage: int, model: Any = None, **changes: Any) -> Trainer:
    folder = str(side.folder / f"stage {stage}")
    arguments = side.arguments(config(stage), output_dir=folder, **({"max_steps": 4} | changes))
    model = gpt2() if model is None else model
    return Trainer(model, arguments, train_dataset=texts(padded=True), eval_dataset=texts(27))


def _saved(side: Side, name: str) -> Path:
    """A GPT-2 whose weights are another seed's, written by plain transformers."""
    folder = side.folder / name
    gpt2(seed=7).save_pretrained(folder)
    return folder


def full(side: Side, *, stage: int) -> dict[str, Any]:
    """Trains, evaluates, saves the model and checkpoints, and goes on from one of them."""
    more = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = _trainer(side, stage, **more)
    found = train(trainer, ended=True) | {"whole": whole(trainer.model)}
    folder = side.folder / f"saved {stage}"
    trainer.save_model(str(folder))
    found["read"] = squares(GPT2LMHeadModel.from_pretrained(folder))
    prompts = torch.arange(12).reshape(3, 4)
    tokens = trainer.model.generate(prompts, max_new_tokens=8, do_sample=False)
    found["tokens"] = tokens.tolist()
    found["predicted"] = trainer.predict(texts(27)).metrics["test_loss"]
    checkpoint = str(side.folder / f"stage {stage}" / "checkpoint-2")
    again = train(_trainer(side, stage, **more), resume=checkpoint, ended=True)
    return found | {"again": again}


def pretrained(side: Side, *, stage: int) -> dict[str, Any]:
    """Weights that are read from a file under `HfDeepSpeedConfig`, and a bigger vocabulary."""
    told = HfDeepSpeedConfig(config(stage))
    assert is_deepspeed_zero3_enabled() == (stage == 3)
    model = GPT2LMHeadModel.from_pretrained(_saved(side, f"pretrained {stage}"))
    on_host = [n for n, p in model.named_parameters() if p.dim() > 1 and not arrays.is_mine(p)]
    assert squares(model) == squares(gpt2(seed=7))
    torch.manual_seed(0)
    model.resize_token_embeddings(VOCABULARY + 8)
    assert model.lm_head.weight is model.transformer.wte.weight
    made = AutoModelForCausalLM.from_config(model.config)
    assert all(value > 0 for value in squares(made).values())
    trainer = _trainer(side, stage, model)
    found = train(trainer, ended=True) | {"whole": whole(trainer.model), "on_host": on_host}
    del told
    return found


def lora(side: Side, *, stage: int) -> dict[str, Any]:
    """Adapters by peft on a frozen GPT-2, saved and loaded by peft."""
    shape = LoraConfig(r=8, target_modules=["c_attn"], lora_dropout=0.0, task_type="CAUSAL_LM")
    told = HfDeepSpeedConfig(config(stage))
    model = GPT2LMHeadModel.from_pretrained(_saved(side, f"base {stage}"))
    torch.manual_seed(1)
    trainer = _trainer(side, stage, get_peft_model(model, shape), learning_rate=1e-2)
    found = train(trainer, ended=True) | {"whole": whole(trainer.model)}
    del told
    found["after"] = trainer.evaluate()["eval_loss"]
    folder = str(side.folder / f"adapter {stage}")
    trainer.save_model(folder)
    read = PeftModel.from_pretrained(gpt2(seed=7), folder)
    found["read"] = {name: value for name, value in squares(read).items() if "lora" in name}
    return found


def evaluated_only(side: Side) -> dict[str, Any]:
    """An evaluation before anything is trained, which transformers leaves to stage 3."""
    trainer = _trainer(side, 3)
    found = {"loss": trainer.evaluate()["eval_loss"], "whole": whole(trainer.model)}
    rows = torch.stack([row["input_ids"] for row in texts(27)])
    with torch.no_grad():
        return found | {"plain": gpt2()(input_ids=rows, labels=rows).loss.item()}


full_2, full_3 = (functools.partial(full, stage=stage) for stage in SECTIONS)
pretrained_2, pretrained_3 = (functools.partial(pretrained, stage=stage) for stage in SECTIONS)
lora_2, lora_3 = (functools.partial(lora, stage=stage) for stage in SECTIONS)
