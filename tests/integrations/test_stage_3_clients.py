"""Clients whose JSON says stage 3: parameters rest as shards, and numbers are those of stage 2."""

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import test_accelerate, test_lightning, test_transformers

# `make test-newest` installs none.
pytestmark = [
    pytest.mark.backends("jax", test_all="torch_xla"),
    pytest.mark.slow,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("transformers", "accelerate", "lightning")),
        reason="the clients aren't installed",
    ),
]
# A gathered parameter has the very numbers of a whole one, and measured is no difference. What XLA
# fuses around it may be another, and so the last of fp32's 7 digits.
CLOSE = functools.partial(pytest.approx, rel=2e-6)
RUNS = ("full", "pretrained", "lora")
NUMBERS = ("loss", "grad_norm", "learning_rate", "eval", "train_loss", "squares")
ALL = {"stage": 3, "stage3_param_persistence_threshold": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Trainer's scripts of both stages found, in one process."""
    names = [f"{name}_{stage}" for name in RUNS for stage in (2, 3)]
    return test_transformers.run(
        "spmdzero", tmp_path_factory.mktemp("stages"), *names, "evaluated_only"
    )


def same(three: Any, two: Any, name: str) -> None:
    if isinstance(two, dict):
        assert three.keys() == two.keys(), name
        for key in two:
            same(three[key], two[key], f"{name} {key}")
    elif isinstance(two, list) and two and isinstance(two[0], dict):
        for index, pair in enumerate(zip(three, two, strict=True)):
            same(*pair, f"{name}[{index}]")
    else:
        assert three == CLOSE(two), name


@pytest.mark.parametrize("name", RUNS)
def test_a_trainer_of_stage_3_has_the_numbers_of_stage_2(
    trained: dict[str, Any], name: str
) -> None:
    two, three = trained[f"{name}_2"], trained[f"{name}_3"]
    assert "error" not in two, two["error"]
    assert "error" not in three, three["error"]
    for key in NUMBERS:
        same(three[key], two[key], key)
    # transformers reads a file into one module after the other, each of which leaves the host.
    assert three.get("on_host", []) == []
    assert set(two.get("on_host", two["squares"])) == set(two["squares"])
    # Every matrix rests as shards, frozen ones too; and none does at stage 2.
    assert three["whole"] == []
    assert set(two["whole"]) == set(two["squares"])
    assert len(set(three["compiled"][2:])) == 1


def test_what_a_trainer_of_stage_3_saves_is_whole(trained: dict[str, Any]) -> None:
    full, adapter = trained["full_3"], trained["lora_3"]
    assert full["read"] == full["squares"]
    assert adapter["read"] == trained["lora_2"]["read"]
    assert len(adapter["read"]) == 4
    assert all(value > 0 for value in adapter["read"].values())
    assert full["tokens"] == trained["full_2"]["tokens"]
    assert adapter["after"] == CLOSE(trained["lora_2"]["after"])


def test_a_trainer_of_stage_3_resumes_bit_for_bit(trained: dict[str, Any]) -> None:
    straight, again = trained["full_3"], trained["full_3"]["again"]
    for key in ("loss", "grad_norm", "learning_rate", "weights"):
        assert again[key] == straight[key], key


def test_a_trainer_of_stage_3_evaluates_what_it_has_not_trained(trained: dict[str, Any]) -> None:
    found = trained["evaluated_only"]
    assert "error" not in found, found["error"]
    assert found["whole"] == []
    # Trainer divides by 32 labels of a row, of which the model predicts all but the first.
    assert found["loss"] == pytest.approx(found["plain"] * 31 / 32, rel=1e-6)


def test_accelerate_trains_saves_and_exports_at_stage_3(tmp_path: Path) -> None:
    seen = test_accelerate.features(tmp_path, "stage_3", "save_and_resume", devices=8)
    three, two = seen["stage_3"], seen["save_and_resume"]
    assert three["whole"] == []
    assert three["straight"] == CLOSE(two["straight"])
    assert three["resumed"] == three["straight"]
    assert three["lr resumed"] == three["lr"]
    assert three["same weights"]
    assert (three["class"], three["devices"]) == ("GPT2LMHeadModel", ["cpu"])


def test_lightning_trains_evaluates_and_resumes_at_stage_3(tmp_path: Path) -> None:
    # An epoch of two batches, whose end is where it is saved.
    usual = {"steps": 4, "data": 32, "shuffle": False, "zero": ALL, "late": True}
    saved = usual | {"folder": str(tmp_path), "save_at": 2}
    orders = [
        {"steps": 4, "data": 32, "shuffle": False, "evaluates_first": True},
        usual | {"evaluates_first": True},
        saved,
        usual | {"resume": str(tmp_path / "2.ckpt")},
    ]
    two, three, straight, again = test_lightning.loop("spmdzero", orders, devices=8)["spmdzero"]
    for name in ("losses", "norms", "lr", "tested"):
        assert test_lightning.flat(three[name]) == CLOSE(test_lightning.flat(two[name])), name
    # At the end of the evaluation, and when training starts.
    assert (two["in parts"], three["in parts"]) == ([0, 0], [1, 1])
    assert again["losses"] == straight["losses"][2:]


def test_lightnings_own_stage_3_is_taken_by_its_number() -> None:
    order = {"steps": 2, "stage": 3, "summary": True}
    (seen,) = test_lightning.loop("spmdzero", [order], devices=8)["spmdzero"]
    assert len(seen["losses"]) == 2
    # Each of its matrices is below DeepSpeed's threshold of 100,000 elements.
    assert seen["in parts"] == [0]
    # Lightning's summary, which it prints by default, asks parameters for DeepSpeed's attributes.
    assert seen["summary"] == [seen["parameters"]]


def test_lightnings_own_checkpoint_is_loaded_into_shards(tmp_path: Path) -> None:
    usual = {"steps": 3, "data": 32, "shuffle": False, "schedule": "epoch"}
    saved = usual | {"folder": str(tmp_path), "save_at": 2}
    (plain,) = test_lightning.loop("plain", [saved], devices=1)["plain"]
    order = usual | {"zero": ALL, "resume": str(tmp_path / "2.ckpt"), "resumes_file": True}
    (seen,) = test_lightning.loop("spmdzero", [order], devices=8)["spmdzero"]
    # Of its states Lightning takes the weights only, and says so.
    assert seen["losses"] == pytest.approx(plain["losses"][2:], rel=test_lightning.TOLERANCE)
    assert seen["in parts"] == [1]
