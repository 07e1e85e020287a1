"""What `from_pretrained` makes after a client has read its arguments, beside plain transformers.

`python -m tests.integrations.loaded_models CLIENT STAGE ORDER FOLDER` prints, for each model, the
tensors that differ from those of a process in which our devices haven't started.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import spmdzero.integrations

# transformers looks for torch_xla when it is imported.
spmdzero.integrations.install()

# ruff: noqa: E402
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    GPT2PreTrainedModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
from transformers.utils import logging

from spmdzero._replaced import REPLACED

CLIENTS = ("trainer", "accelerate", "lightning", "init_distributed")
ORDERS = ("client, load", "load, client, load", "client, load inside of zero.Init, load")
_SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


class WithNewHead(GPT2PreTrainedModel):
    """A model that fills what a checkpoint lacks with numbers of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer = GPT2Model(config)
        self.new_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.register_buffer("scales", torch.tensor([2.0, 3.0]), persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is getattr(self, "new_head", None):
            nn.init.constant_(module.weight, -100.0)
            nn.init.constant_(module.bias, 100.0)
        if module is self:
            nn.init.constant_(self.scales, 7.0)


def _classes(count: int, **more: Any) -> dict[str, Any]:
    return {"num_labels": count} | more


_GPT2 = GPT2Config(
    vocab_size=64, n_layer=1, n_head=2, n_embd=32, n_positions=16, bos_token_id=0, eos_token_id=0
)
_VIT = ViTConfig(**_SMALL, image_size=16, patch_size=8)
_RESNET = ResNetConfig(
    embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_channels=3
)
# What is saved, and how it is loaded.
_Load = Callable[[str], PreTrainedModel]
_MODELS: dict[str, tuple[Callable[[], PreTrainedModel], _Load]] = {
    "rotary table in no file": (
        lambda: LlamaForCausalLM(LlamaConfig(vocab_size=64, **_SMALL)),
        AutoModelForCausalLM.from_pretrained,
    ),
    "tied": (
        lambda: LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **_SMALL)),
        AutoModelForCausalLM.from_pretrained,
    ),
    "head of no file, position_ids": (
        lambda: BertModel(BertConfig(vocab_size=50, **_SMALL), add_pooling_layer=False),
        AutoModelForSequenceClassification.from_pretrained,
    ),
    "head of another size": (
        lambda: ViTForImageClassification(_VIT),
        lambda path: ViTForImageClassification.from_pretrained(
            path, num_labels=5, ignore_mismatched_sizes=True
        ),
    ),
    "head that its class fills": (lambda: GPT2Model(_GPT2), WithNewHead.from_pretrained),
    "running statistics": (
        lambda: ResNetForImageClassification(_RESNET),
        lambda path: ResNetForImageClassification.from_pretrained(
            path, num_labels=5, ignore_mismatched_sizes=True
        ),
    ),
}


def _saved(folder: Path) -> None:
    for name, (make, _) in _MODELS.items():
        torch.manual_seed(0)
        make().save_pretrained(folder / name)


def _loaded(folder: Path, name: str) -> PreTrainedModel:
    torch.manual_seed(1)
    return _MODELS[name][1](str(folder / name))


def _names() -> list[str]:
    left = NOT_AT_STAGE_3 if is_deepspeed_zero3_enabled() else ()
    return [name for name in _MODELS if name not in left]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.detach().cpu().clone() for name, tensor in named}


def _in_a_fork(function: Callable[[], None]) -> None:
    # What a process has loaded once without our devices, torch's tables know for good.
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            function()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _differences(model: nn.Module, expected: dict[str, torch.Tensor], stage: int) -> list[str]:
    with spmdzero.zero.GatheredParameters(list(model.parameters())):
        made = _tensors(model)
    assert made.keys() == expected.keys()
    return [
        f"{name}: {made[name].flatten()[:3].tolist()} and not {right.flatten()[:3].tolist()}"
        for name, right in expected.items()
        if not _right(name, made[name], right, stage)
    ]


def _right(name: str, made: torch.Tensor, expected: torch.Tensor, stage: int) -> bool:
    if (made.shape, made.dtype) != (expected.shape, expected.dtype):
        return False
    if name not in DRAWN or not (stage == 3 and is_deepspeed_zero3_enabled()):
        return torch.equal(made, expected)
    # transformers draws a whole model then, and so the head from other random numbers. They are
    # normal, with a standard deviation of 0.02; one in 5e8 is beyond six of it.
    return float(made.abs().max()) < 6 * 0.02 and float(made.std()) > 0.01


# What no file has, and the class draws.
DRAWN = ("classifier.weight", "bert.pooler.dense.weight")
# transformers refuses them when its own code loads a model for stage 3.
NOT_AT_STAGE_3 = ("head of another size", "running statistics")


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "spmd": {"min_shard_elements": 256},
    }


@contextlib.contextmanager
def _started(client: str, stage: int, folder: Path) -> Iterator[None]:
    """The client's arguments are read; inside of it a script loads its model."""
    held: Any = None
    if client == "trainer":
        held = TrainingArguments(str(folder / "out"), deepspeed=_config(stage), report_to=[])
        held.device  # noqa: B018 (it starts the devices)
    elif client == "accelerate":
        from accelerate import Accelerator, DeepSpeedPlugin

        plugin = DeepSpeedPlugin(hf_ds_config=_config(stage), zero3_init_flag=stage == 3)
        held = Accelerator(deepspeed_plugin=plugin)
    elif client == "init_distributed":
        spmdzero.init_distributed()
        if stage == 3:
            held = HfDeepSpeedConfig(_config(3) | {"train_micro_batch_size_per_gpu": 1})
    yield
    del held


def _in_lightning(stage: int, inside: Callable[[], None]) -> None:
    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel

    from spmdzero.integrations.lightning import SpmdZeroStrategy

    class Loading(BoringModel):
        def configure_model(self) -> None:
            inside()

    strategy = SpmdZeroStrategy(stage=stage)
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=strategy, max_steps=1, logger=False, limit_val_batches=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Loading())


def _run(client: str, stage: int, order: str, folder: Path) -> dict[str, list[str]]:
    _in_a_fork(lambda: _saved(folder))
    _in_a_fork(
        lambda: torch.save(
            {name: _tensors(_loaded(folder, name)) for name in _MODELS}, folder / "expected.pt"
        )
    )
    assert "torch.tensor" not in REPLACED
    expected = torch.load(folder / "expected.pt")
    found: dict[str, list[str]] = {}

    def check(when: str, stage: int) -> None:
        for name in _names():
            wrong = _differences(_loaded(folder, name), expected[name], stage)
            found.update({f"{name}, {when}": wrong} if wrong else {})

    if order.startswith("load"):
        check("first", 0)
    if client == "lightning":
        _in_lightning(stage, lambda: check("in configure_model", stage))
    else:
        with _started(client, stage, folder):
            check("after the client", stage)
    if order.endswith("zero.Init, load"):
        _inside_of_init(folder)
        check("after zero.Init", 0)
    return found


def _inside_of_init(folder: Path) -> None:
    held = HfDeepSpeedConfig(_config(3) | {"train_micro_batch_size_per_gpu": 1})
    for name in _names():
        _loaded(folder, name)
    del held


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    client, stage, order, folder = sys.argv[1:]
    print(json.dumps(_run(client, int(stage), order, Path(folder))))
