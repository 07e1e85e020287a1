"""SPMDZERO_ROWS=device: a client's batch sizes are those of a device, as on GPUs."""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from spmdzero.errors import SpmdZeroUsageError
from spmdzero.integrations._rows_of_devices import VARIABLE, JoinedBatches, of_a_device
from tests.support.deepspeed import run_ranks
from tests.support.processes import ROOT, run_python

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

LOOP = ["-m", "tests.integrations.ranks_loop"]


@pytest.mark.parametrize("schedule", ["torch", pytest.param("dummy", marks=pytest.mark.slow)])
def test_a_loop_sees_what_the_ranks_of_deepspeed_see(schedule: str) -> None:
    told = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
    ranks = run_ranks([*LOOP, "deepspeed", schedule], ranks=2, cwd=ROOT, timeout=300, **told)
    theirs = json.loads(ranks[0].splitlines()[-1])
    said = run_python(*LOOP, "spmdzero", schedule, devices=2, SPMDZERO_ROWS="device")
    ours: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert ours.pop("first ids") == theirs.pop("first ids")
    assert ours.pop("batches") == theirs.pop("batches") == [4, 2]
    assert ours["lr"] == pytest.approx(theirs["lr"])
    # fp32 of two orders of summation, through 8 steps of AdamW.
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_a_joined_batch_is_what_the_processes_get(drop: bool, even: bool) -> None:
    for rows, size, count in itertools.product((1, 7, 16, 23, 24), (1, 3), (2, 4)):
        batches = BatchSampler(SequentialSampler(range(rows)), size, drop)
        shard = functools.partial(BatchSamplerShard, batches, count, even_batches=even)
        expected = [
            list(itertools.chain(*found))
            for found in itertools.zip_longest(*map(shard, range(count)), fillvalue=[])
        ]
        joined = JoinedBatches(batches, shard=BatchSamplerShard, count=count, even=even)
        assert list(joined) == expected
        assert len(joined) == len(expected)


def test_a_random_order_is_drawn_once_an_epoch() -> None:
    order = RandomSampler(range(24), generator=torch.Generator().manual_seed(0))
    joined = JoinedBatches(
        BatchSampler(order, 3, False), shard=BatchSamplerShard, count=4, even=True
    )
    first, second = (list(itertools.chain(*joined)) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


def test_an_unknown_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "devices")
    with pytest.raises(SpmdZeroUsageError, match=r"SPMDZERO_ROWS=devices.*'device'"):
        of_a_device()


SCRIPT = """
import sys, torch
import spmdzero.integrations
spmdzero.integrations.install()
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

class Rows(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(8, 2))

options, data = {}, TensorDataset(torch.ones(8, 2))
if sys.argv[1] == "iterated":
    data = Rows()
if sys.argv[1] == "split":
    from accelerate.utils import DataLoaderConfiguration
    options["dataloader_config"] = DataLoaderConfiguration(split_batches=True)
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), **options)
accelerator.prepare(DataLoader(data, batch_size=2))
"""


@pytest.mark.parametrize(
    ("case", "why"),
    [("iterated", "is only iterated"), ("split", "split_batches=True makes")],
)
def test_a_loader_that_cannot_be_joined_is_refused(case: str, why: str) -> None:
    with pytest.raises(AssertionError, match=rf"SPMDZERO_ROWS=device: .*{why}.*Leave SPMDZERO_"):
        run_python("-c", SCRIPT, case, devices=2, SPMDZERO_ROWS="device")


TRAINER = """
import json, sys
import spmdzero.integrations
spmdzero.integrations.install()
from transformers import Trainer, TrainingArguments
from tests.integrations.accelerate_loop import data_of, model_of

config = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
          "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 2}}
arguments = TrainingArguments(
    output_dir=sys.argv[2], deepspeed=config, per_device_train_batch_size=int(sys.argv[1]),
    per_device_eval_batch_size=int(sys.argv[1]), gradient_accumulation_steps=2, logging_steps=1,
    num_train_epochs=1, learning_rate=1e-3, report_to=[], save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(
    model_of({"frozen": False}), arguments,
    train_dataset=data_of(32, masked=True), eval_dataset=data_of(8, masked=False, seed=2),
)
trainer.train()
found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
found.append(trainer.evaluate()["eval_loss"])
print(json.dumps([found, trainer.get_total_train_batch_size(arguments)]))
"""


def test_a_trainer_with_rows_of_a_device_is_one_with_rows_of_the_process(tmp_path: Path) -> None:
    def printed(rows: int, **told: str) -> Any:
        said = run_python("-c", TRAINER, str(rows), str(tmp_path), devices=2, **told)
        return json.loads(said.splitlines()[-1])

    of_devices, of_process = printed(2, SPMDZERO_ROWS="device"), printed(4)
    assert of_devices == of_process
    assert len(of_devices[0]) == 5
    assert of_devices[1] == 8
