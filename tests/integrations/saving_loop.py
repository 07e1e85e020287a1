"""Saves a module that an engine has trained in a loop of one's own, by all that writes files."""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import huggingface_hub
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import spmdzero
from spmdzero.backend import current

TIED = {"lm_head.weight", "model.embed_tokens.weight"}


def _files_of_state(module: Any, folder: str) -> None:
    state = {name: value for name, value in module.state_dict().items() if name != "lm_head.weight"}
    safetensors.torch.save_file(state, f"{folder}/a.safetensors")


SAVERS: dict[str, Callable[[Any, str], Any]] = {
    "torch.save": lambda module, folder: torch.save(module.state_dict(), f"{folder}/a.pt"),
    "safetensors.save_file": _files_of_state,
    "safetensors.save_model": lambda module, folder: safetensors.torch.save_model(
        module, f"{folder}/a.safetensors"
    ),
    "save_pretrained": lambda module, folder: module.save_pretrained(folder),
    "accelerate": lambda module, folder: accelerate.Accelerator(cpu=True).save_model(
        module, folder
    ),
    "hub": lambda module, folder: huggingface_hub.save_torch_model(module, folder),
}


def _trained(stage: int, *, adapted: bool = False) -> spmdzero.Engine:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model: Any = LlamaForCausalLM(
        LlamaConfig(**shape, num_attention_heads=2, vocab_size=32, tie_word_embeddings=True)
    )
    if adapted:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine, *_ = spmdzero.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": zero,
            "spmd": {"min_shard_elements": 1},
        },
    )
    ids = torch.randint(0, 32, (2, 6))
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    engine.step()
    return engine


def _written(folder: str) -> dict[str, torch.Tensor]:
    found = {}
    for file in Path(folder).iterdir():
        if file.suffix == ".safetensors":
            found |= safetensors.torch.load_file(file)
        elif file.suffix == ".pt":
            found |= torch.load(file)
    return found


def _saved(engine: spmdzero.Engine, save: Callable[[Any, str], Any]) -> dict[str, Any]:
    expected = {n: p.detach().cpu() for n, p in engine.module.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        save(engine.module, folder)
        written = _written(folder)
    twice = written.keys() >= TIED
    (kept,) = TIED & expected.keys() or (None,)
    named = {kept if name in TIED and kept else name: value for name, value in written.items()}
    # An adapter's file has names without the adapter's own.
    named = {
        next((n for n in expected if n.replace(".default", "") == name), name): value
        for name, value in named.items()
    }
    equal = all(torch.equal(value, expected[name]) for name, value in named.items())
    return {"names": sorted(named), "equal": equal, "tied twice": twice}


def main() -> None:
    """Prints what each saver wrote, by stage, and whether torch_xla can be found."""
    found: dict[str, Any] = {}
    for stage in (2, 3):
        engine = _trained(stage)
        for name, save in SAVERS.items():
            found[f"{name}, stage {stage}"] = _saved(engine, save)
    found["parameters"] = sorted(name for name, _ in engine.module.named_parameters())
    engine = _trained(2, adapted=True)
    found["peft"] = _saved(engine, SAVERS["save_pretrained"])
    found["backend"] = current().name
    found["imported"] = sys.modules.get("torch_xla") is not None
    found["found"] = importlib.util.find_spec("torch_xla") is not None
    print(json.dumps(found))


if __name__ == "__main__":
    main()
