"""ms-swift's loss where one process has the rows of several devices.

ms-swift isn't installed here: a package of its name has its function, word for word. The real one
runs in `make test-stack-swift`.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations import _lengths, _swift
from spmdzero.integrations._initialize import initialize_for_client
from tests.support.bounds import summed
from tests.support.engines import assert_trained_as, config

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

ROWS, LENGTH, WORDS = 16, 7, 11
TEMPLATES = """
class Template:
    def compute_sft_loss(self, model, inputs, num_items_in_batch=None, trainer=None):
        outputs = model(**inputs)
        if 'labels' in inputs:
            labels = inputs['labels']
            outputs.loss = outputs.loss.to(labels.device)
            if num_items_in_batch is not None:
                outputs.loss = outputs.loss * ((labels[:, 1:] != -100).sum() / num_items_in_batch)
        return outputs
"""
MIXINS = """
class SwiftMixin:
    def __init__(self, args):
        self.args, self.is_deepspeed_enabled = args, args.deepspeed is not None

    def get_use_logits_to_keep(self, default_value=True):
        if self.args.use_logits_to_keep is None:
            self.args.use_logits_to_keep = default_value
        return self.args.use_logits_to_keep
"""
LOADERS = """
from torch.utils.data import DataLoader

class BatchSamplerShard:
    def __init__(self, total_samples, batch_size, tp_size=1):
        self.tp_size = tp_size
        self.total_samples = total_samples // (1 // tp_size)

class DataLoaderShard(DataLoader):
    def __iter__(self):
        yield from super().__iter__()
"""
TRAINERS = """
class Seq2SeqTrainer:
    def __init__(self, is_deepspeed_enabled):
        self.is_deepspeed_enabled = is_deepspeed_enabled
"""


class Model(nn.Module):
    """transformers' form without `num_items_in_batch`: the mean over the next labels, logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        logits = self.head(self.embed(input_ids).tanh())
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)  # pyrefly: ignore[bad-argument-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the package, from which it is imported, and not twice."""
    package = tmp_path / "swift"
    for part in ("", "dataloader", "template", "trainers"):
        (package / part).mkdir()
        (package / part / "__init__.py").write_text("__version__ = '4.6.0'")
    (package / "template" / "base.py").write_text(TEMPLATES)
    (package / "dataloader" / "shard.py").write_text(LOADERS)
    (package / "trainers" / "mixin.py").write_text(MIXINS)
    (package / "trainers" / "seq2seq_trainer.py").write_text(TRAINERS)
    monkeypatch.syspath_prepend(tmp_path)
    finders = [*sys.meta_path]
    _swift.follow_imports()
    _lengths.follow_imports()
    yield package
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "swift"]:
        del sys.modules[name]


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Ids and labels, a different number of labels in each row, none on the first devices."""
    torch.manual_seed(seed)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH))
    kept = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (ROWS, 1))
    kept[:4] = False
    return {"input_ids": ids, "labels": torch.where(kept, ids, -100)}


def test_the_loss_is_the_mean_over_all_labels_of_a_step(folder: Path) -> None:
    template = importlib.import_module("swift.template.base").Template()
    model, theirs = Model(), Model()
    engine = initialize_for_client(
        model=model,
        config_params=config(
            train_micro_batch_size_per_gpu=ROWS,
            gradient_accumulation_steps=2,
            optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        ),
    )[0]
    adam = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(2):
        parts = [batch(2 * step), batch(2 * step + 1)]
        items = sum((part["labels"][:, 1:] != -100).sum() for part in parts)
        for part in parts:
            loss = template.compute_sft_loss(engine, part, num_items_in_batch=items).loss
            # As Trainer has it of a model that divides by the items of all micro-batches.
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()
            wanted = template.compute_sft_loss(theirs, part, num_items_in_batch=items).loss
            wanted.backward()
            assert loss.item() == summed(wanted.item())
        adam.step()
        adam.zero_grad()
    assert_trained_as(engine, theirs)


def test_without_items_the_loss_is_the_devices_mean_as_without_ms_swift(folder: Path) -> None:
    template = importlib.import_module("swift.template.base").Template()
    engine = initialize_for_client(
        model=Model(), config_params=config(train_micro_batch_size_per_gpu=ROWS)
    )[0]
    part = batch(0)
    part["labels"] = part["input_ids"]
    template.compute_sft_loss(engine, part, num_items_in_batch=torch.tensor(7))
    with torch.no_grad():
        found = template.compute_sft_loss(engine, part).loss
    assert found.item() == summed(engine(**part).loss.item())
    assert found.item() == summed(Model()(**part).loss.item())


def test_a_release_with_another_loss_is_refused_where_an_engine_would_train(folder: Path) -> None:
    (folder / "template" / "base.py").write_text(TEMPLATES.replace("[:, 1:] != -100", " >= 0"))
    importlib.import_module("swift.template.base")
    trainers: Any = importlib.import_module("swift.trainers.seq2seq_trainer")
    assert trainers.Seq2SeqTrainer(is_deepspeed_enabled=False) is not None
    with pytest.raises(SpmdZeroUsageError, match=r"ms-swift 4.6.0: its .* Install ms-swift 4.6"):
        trainers.Seq2SeqTrainer(is_deepspeed_enabled=True)


@pytest.mark.parametrize(
    ("deepspeed", "asked", "kept"),
    [({}, None, False), ({}, True, True), ({}, False, False), (None, None, True)],
)
def test_all_logits_are_computed_unless_fewer_are_asked_for(
    deepspeed: Any, asked: Any, kept: bool, folder: Path
) -> None:
    mixins: Any = importlib.import_module("swift.trainers.mixin")
    args = SimpleNamespace(deepspeed=deepspeed, use_logits_to_keep=asked)
    assert mixins.SwiftMixin(args).get_use_logits_to_keep() is kept
    assert args.use_logits_to_keep is kept


@pytest.mark.parametrize("engine", [True, False])
def test_its_loader_pads_to_few_lengths_where_an_engine_trains(
    engine: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lengths, "choice", lambda: "auto" if engine else None)
    loaders: Any = importlib.import_module("swift.dataloader.shard")
    names = ("input_ids", "attention_mask", "labels")
    rows = [{name: torch.ones(1, n, dtype=torch.long) for name in names} for n in (30, 31, 65)]
    loader = loaders.DataLoaderShard(rows, batch_size=None)
    assert [part["labels"].shape[1] for part in loader] == [
        30,
        *([64, 128] if engine else [31, 65]),
    ]


def test_its_sampler_counts_a_batch_once_where_devices_share_rows(folder: Path) -> None:
    loaders: Any = importlib.import_module("swift.dataloader.shard")
    assert loaders.BatchSamplerShard(64, batch_size=8, tp_size=2).total_samples == 64
