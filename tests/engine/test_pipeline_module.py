"""`PipelineModule`: DeepSpeed's pipelines as a list of layers, at any ZeRO stage."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from spmdzero.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from spmdzero.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

import spmdzero
from spmdzero.errors import SpmdZeroCheckpointError, SpmdZeroUsageError
from tests.oracle.pipeline import (
    CHECKPOINT,
    LENGTH,
    MICRO_BATCHES,
    NARROW,
    SAVED_AFTER,
    STEPS,
    VOCABULARY,
    WIDTH,
    Block,
    Table,
    layers_of,
    loss_of,
    pairs,
)
from tests.support import engines

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

# What DeepSpeed 0.19.8 printed, by tests/oracle/pipeline.py.
LOSSES = [55.03197479248047, 53.68013000488281, 51.364501953125, 50.441871643066406]
EVALUATED = 50.272979736328125


def pipeline(*, width: int = WIDTH, seed: int = 0, **more: Any) -> PipelineModule:
    torch.manual_seed(seed)
    layers = layers_of(LayerSpec, TiedLayerSpec, width=width)
    return PipelineModule(layers, **{"num_stages": 2, "loss_fn": loss_of} | more)


def start(stage: int = 1, *, micro_batches: int = 2, **more: Any) -> spmdzero.PipelineEngine:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = engines.start(
        pipeline(**more),
        zero_optimization=zero,
        gradient_accumulation_steps=micro_batches,
        gradient_clipping=1.0,
    )
    assert isinstance(engine, spmdzero.PipelineEngine)
    return engine


def narrow(stage: int) -> spmdzero.PipelineEngine:
    """The pipeline that DeepSpeed's two stages saved, of other values."""
    return start(stage, width=NARROW, seed=5)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_deepspeeds_stages_saved_goes_on(stage: int) -> None:
    engine = narrow(stage)
    path, _ = engine.load_checkpoint(CHECKPOINT)
    assert path is not None
    assert engine.global_steps == SAVED_AFTER
    batches = list(pairs(STEPS * MICRO_BATCHES))[SAVED_AFTER * MICRO_BATCHES :]
    found = [engine.train_batch(iter(batches[at : at + MICRO_BATCHES])).item() for at in (0, 2)]
    # Sums of fp32 in another order, and a tied gradient that DeepSpeed sums over two stages.
    assert found == pytest.approx(json.loads((CHECKPOINT / "losses.json").read_text()), rel=1e-6)


def test_files_of_a_pipeline_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    layer = tmp_path / "saved" / "layer_00-model_states.pt"
    table = torch.load(layer)
    # A copy on the other stage that isn't the same.
    torch.save({"weight": table["weight"] + 1}, layer.with_name("layer_07-model_states.pt"))
    with pytest.raises(SpmdZeroCheckpointError, match="tied as tied_modules"):
        narrow(1).load_checkpoint(tmp_path)
    torch.save(table, layer.with_name("layer_07-model_states.pt"))
    assert narrow(1).load_checkpoint(tmp_path)[0] is not None
    (tmp_path / "saved" / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(SpmdZeroCheckpointError, match="mp_rank_01"):
        narrow(1).load_checkpoint(tmp_path)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_pipeline_trains_as_deepspeeds(stage: int) -> None:
    engine, batches = start(stage), pairs(8)
    found = [engine.train_batch(batches).item(), engine.train_batch().item()]
    found += [engine.train_batch(data_iter=batches).item() for _ in range(2)]
    # Sums of fp32 in another order, over four steps.
    assert found == pytest.approx(LOSSES, rel=1e-6)
    assert engine.eval_batch(pairs(2, seed=3)).item() == pytest.approx(EVALUATED, rel=1e-6)
    with pytest.raises(RuntimeError, match="Use eval_batch"), torch.no_grad():
        engine.train_batch(pairs(2))


def test_names_and_first_values_are_deepspeeds() -> None:
    model = pipeline(partition_method="uniform")
    names = [name for name, _ in model.named_parameters()]
    assert names[0] == "tied_modules.table.weight"
    assert names[1:5] == ["1.up.weight", "1.up.bias", "1.down.weight", "1.down.bias"]
    torch.manual_seed(0)
    assert torch.equal(model.tied_modules["table"].weight, Table(VOCABULARY, WIDTH).weight)
    # To count parameters DeepSpeed makes each layer once before.
    torch.manual_seed(0)
    for layer in pipeline()._layer_specs:
        if isinstance(layer, LayerSpec):
            layer.build()
    first = pipeline().tied_modules["table"].weight
    assert not torch.equal(first, model.tied_modules["table"].weight)
    seeded = pipeline(seed_layers=True, base_seed=5)
    torch.manual_seed(5 + 2)
    assert torch.equal(getattr(seeded, "2").up.weight, Block(WIDTH).up.weight)


@pytest.mark.parametrize("interval", [1, 3])
def test_layers_that_are_computed_again_change_no_number(interval: int) -> None:
    engine = start(2, activation_checkpoint_interval=interval)
    found = [engine.train_batch(pairs(2, seed=seed)).item() for seed in range(2)]
    other = start(2)
    assert found == [other.train_batch(pairs(2, seed=seed)).item() for seed in range(2)]


def test_evaluation_has_the_mean_loss_and_the_outputs() -> None:
    engine = start()
    engine.train_batch(pairs(2))
    loss = engine.eval_batch(pairs(2, seed=3))
    assert not engine.module.training
    assert engine.global_steps == 1
    again, logits = engine.eval_batch(pairs(2, seed=3), return_logits=True)
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)
    assert tuple(logits.shape) == (8, LENGTH, VOCABULARY)
    outputs = engine.eval_batch(
        pairs(3), compute_loss=False, reduce_output=None, num_micro_batches=3
    )
    assert len(outputs) == 3
    engine.train_batch(pairs(2))
    assert engine.module.training


def test_a_function_makes_pairs_of_batches() -> None:
    engine, plain_engine = start(), start()
    named = ({"tokens": tokens, "labels": labels} for tokens, labels in pairs(2))
    engine.set_batch_fn(lambda batch: (batch["tokens"], batch["labels"]))
    assert engine.train_batch(named).item() == plain_engine.train_batch(pairs(2)).item()
    with pytest.raises(SpmdZeroUsageError, match=r"a pair of inputs and labels.*set_batch_fn"):
        plain_engine.train_batch(iter([{"tokens": 1}]))


def test_a_function_makes_pairs_of_the_engines_own_loader_too() -> None:
    data = [{"tokens": tokens[0], "labels": labels[0]} for tokens, labels in pairs(16)]
    engine = spmdzero.initialize(model=pipeline(), config=engines.config(), training_data=data)[0]
    with pytest.raises(SpmdZeroUsageError, match="a pair of inputs and labels"):
        engine.train_batch()
    engine.set_batch_fn(lambda batch: (batch["tokens"], batch["labels"]))
    assert engine.train_batch().item() > 0


def test_labels_may_be_several() -> None:
    def masked(logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (loss_of(logits, labels[0]) * labels[1]).mean()

    engine = start(loss_fn=masked)
    batches = [(tokens, (labels, torch.ones(8))) for tokens, labels in pairs(2, seed=3)]
    loss = engine.eval_batch(iter(batches))
    again, _ = engine.eval_batch(iter(batches), return_logits=True)
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)


def test_its_own_loader_is_used_over_and_over() -> None:
    data = [(tokens[0], labels[0]) for tokens, labels in pairs(16)]
    engine, _, loader, _ = spmdzero.initialize(
        model=pipeline(), config=engines.config(gradient_accumulation_steps=2), training_data=data
    )
    losses = [engine.train_batch().item() for _ in range(3)]
    assert loader is not None
    assert losses[0] != losses[1]


def test_stages_are_said_once_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    topology = PipeModelDataParallelTopology(num_pp=3, num_mp=1, num_dp=2)
    assert (topology.world_size(), topology.get_dim("pipe")) == (6, 3)
    assert topology.get_coord(5).pipe == 2
    assert topology.get_rank(pipe=2, data=1, model=0) == 5
    with caplog.at_level(logging.INFO, "spmdzero"):
        model = pipeline(topology=topology)
    assert model.num_pipeline_stages() == 3
    assert "a PipelineModule of 3 stages: every device runs all its layers" in caplog.text


def test_what_cannot_be_a_pipeline_says_so() -> None:
    with pytest.raises(RuntimeError, match="must provide num_stages or topology"):
        PipelineModule([nn.Linear(2, 2)])
    with pytest.raises(RuntimeError, match=r"only supports torch\.nn\.Module"):
        LayerSpec(dict)
    with pytest.raises(RuntimeError, match="found no valid layers"):
        pipeline(partition_method="type:Attention")
    with pytest.raises(NotImplementedError, match="profile"):
        pipeline(partition_method="profile")
    with pytest.raises(NotImplementedError, match="RECURSIVE"):
        PipelineModule([pipeline()], num_stages=1)
