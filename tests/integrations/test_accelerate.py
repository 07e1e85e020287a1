"""accelerate on spmdzero: a script's numbers are those of the same script without DeepSpeed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import run_python

Seen = dict[str, Any]
ORDERS: dict[str, Seen] = {
    "dummies": {"evaluate_after": 10},
    "accumulation": {"gas": 4},
    "own": {"optimizer": "torch", "schedule": "torch", "stage": 1},
    "callable": {"schedule": "callable", "gas": 4},
    "plugin": {"config": "none", "optimizer": "torch", "schedule": "torch", "gas": 4},
    # 16, 16 and 5 rows, over and over.
    "uneven": {"data": 37, "evaluate_after": 10},
    "frozen": {"frozen": True},
}
# fp32 of two orders of summation: 1e-7 apart in each operation, and 20 steps of AdamW.
TOLERANCE = 1e-5


def loop(roles: str, orders: list[Seen], *, devices: int) -> dict[str, list[Seen]]:
    module = "tests.integrations.accelerate_loop"
    printed = run_python("-m", module, roles, json.dumps(orders), devices=devices)
    return json.loads(printed.splitlines()[-1])


def launched(*options: str, order: Seen, devices: int = 8) -> Seen:
    """What the loop saw under `accelerate launch`, with spmdzero as its deepspeed."""
    cli = ("-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")
    script = ("--module", "tests.integrations.accelerate_loop", "spmdzero", json.dumps([order]))
    printed = run_python(*cli, *options, *script, devices=devices)
    (seen,) = json.loads(printed.splitlines()[-1])["spmdzero"]
    return seen


def features(folder: Path, *names: str, devices: int) -> dict[str, Seen]:
    module = "tests.integrations.accelerate_features"
    printed = run_python("-m", module, str(folder), *names, devices=devices)
    return json.loads(printed.splitlines()[-1])


def assert_same_numbers(ours: Seen, plain: Seen) -> None:
    for name in ("losses", "norms", "lr"):
        assert ours[name] == pytest.approx(plain[name], rel=TOLERANCE), name
    assert ours["lr"][0] != ours["lr"][-1]
    assert ours["losses"][-1] < ours["losses"][0] - 0.3


def assert_same_evaluation(ours: Seen, plain: Seen) -> None:
    # Two whole batches of 16 rows, and one of 5.
    assert ours["rows"] == plain["rows"] == 37
    assert ours["guesses"] == plain["guesses"]
    assert ours["eval losses"] == pytest.approx(plain["eval losses"], rel=TOLERANCE)


def test_a_script_on_8_devices_has_the_numbers_of_accelerate_alone():
    seen = loop("plain,spmdzero", [ORDERS["uneven"]], devices=8)
    (plain,), (ours,) = seen["plain"], seen["spmdzero"]
    assert_same_numbers(ours, plain)
    assert_same_evaluation(ours, plain)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_every_way_to_configure_it_has_the_numbers_of_accelerate_alone(devices: int):
    seen = loop("plain,spmdzero", list(ORDERS.values()), devices=devices)
    for name, plain, ours in zip(ORDERS, seen["plain"], seen["spmdzero"], strict=True):
        assert_same_numbers(ours, plain)
        if ORDERS[name].get("evaluate_after"):
            assert_same_evaluation(ours, plain)


LAUNCHED_CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 1
mixed_precision: 'no'
deepspeed_config:
  zero_stage: 2
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
"""
DEEPSPEED_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("told_by", ["config file", "options", "DeepSpeed's config"])
def test_what_accelerate_launch_is_told_reaches_the_engine(told_by: str, tmp_path: Path):
    if told_by == "config file":
        (tmp_path / "accelerate.yaml").write_text(LAUNCHED_CONFIG)
        options = ["--config_file", str(tmp_path / "accelerate.yaml")]
    else:
        options = ["--use_deepspeed", "--num_processes", "1"]
        if told_by == "options":
            options += ["--zero_stage", "2", "--gradient_accumulation_steps", "4"]
            options += ["--gradient_clipping", "1.0"]
        else:
            (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED_CONFIG))
            options += ["--deepspeed_config_file", str(tmp_path / "ds.json")]
    order = {"gas": 4, "optimizer": "torch", "schedule": "torch"}
    ours = launched(*options, order=order | {"config": "launched"})
    (plain,) = loop("plain", [order], devices=1)["plain"]
    assert_same_numbers(ours, plain)


@pytest.mark.slow
def test_a_state_resumes_bit_for_bit_and_on_other_devices(tmp_path: Path):
    seen = features(tmp_path, "save_and_resume", devices=8)["save_and_resume"]
    assert seen["resumed"] == seen["straight"]
    assert seen["lr resumed"] == seen["lr"]
    assert seen["same weights"]
    elsewhere = features(tmp_path, "resume", devices=2)["resume"]
    assert elsewhere["resumed"] == pytest.approx(seen["straight"], rel=TOLERANCE)


@pytest.mark.slow
def test_the_weights_leave_as_plain_transformers_reads_them(tmp_path: Path):
    seen = features(tmp_path, "export", devices=8)["export"]
    assert seen == {"class": "GPT2LMHeadModel", "devices": ["cpu"]}
    expected = torch.load(tmp_path / "weights.pt")
    program = (
        "import sys, torch, transformers as t; from pathlib import Path;"
        "folder = Path(sys.argv[1]);"
        "got = {n: t.GPT2LMHeadModel.from_pretrained(folder / n).state_dict()"
        " for n in ('pretrained', 'without_dict')};"
        "torch.save(got, folder / 'read.pt')"
    )
    run_python("-c", program, str(tmp_path), USE_TORCH_XLA="false")
    for name, read in torch.load(tmp_path / "read.pt").items():
        assert read.keys() == expected.keys(), name
        assert all(torch.equal(read[key], value) for key, value in expected.items()), name
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(value, expected[key]) for key, value in saved.items())
    # Tied weights are saved once.
    assert expected.keys() - saved.keys() <= {"lm_head.weight"}


@pytest.mark.slow
def test_an_overflow_of_fp16_is_a_step_that_was_skipped(tmp_path: Path):
    seen = features(tmp_path, "overflow", devices=8)["overflow"]
    assert seen["precision"] == "fp16"
    first = seen["skipped"].index(False)
    assert 0 < first < 12
    assert all(seen["skipped"][:first])
    assert not any(seen["skipped"][first:])


@pytest.mark.slow
def test_micro_batches_by_hand_are_those_of_accumulate(tmp_path: Path):
    for stage, seen in features(tmp_path, "without_sync", devices=8)["without_sync"].items():
        assert seen["by hand"] == pytest.approx(seen["accumulated"], rel=TOLERANCE), stage


@pytest.mark.slow
def test_collectives_take_outputs_of_the_engine(tmp_path: Path):
    seen = features(tmp_path, "collectives", devices=8)["collectives"]
    loss = seen.pop("loss")
    assert seen.pop("gathered loss") == [loss]
    assert seen.pop("sum") == loss
    assert seen == {
        "gathered logits": [16, 32, 128],
        "mean": [2.0, 4.0],
        "padded": [16, 32, 128],
        "objects": ["a", "b"],
        "printed": "once\n",
        "triggered": True,
        "parts": [1, 2, 3],
        "processes": 1,
        "main": True,
        "device": "cpu",
        "type": "DistributedType.DEEPSPEED",
        "freed": [None, None],
        "engine": True,
    }
