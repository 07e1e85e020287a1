"""Lightning on spmdzero: a script's numbers are those of Lightning alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from spmdzero.backend import current
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

Seen = dict[str, Any]
ORDERS: dict[str, Seen] = {
    # 16, 16 and 5 rows, over and over; validated in the middle of an epoch.
    "uneven": {"data": 37, "validate_every": 2},
    # Ten batches: the last two of an epoch are a step of their own.
    "accumulation": {"data": 160, "gas": 4, "steps": 12, "validate_every": 5},
    "frozen": {"frozen": True, "schedule": "epoch"},
    "stage 1": {"stage": 1, "gas": 4, "data": 128, "clip": None},
    # The last batch has five rows.
    "evaluates first": {"data": 37, "evaluates_first": True, "steps": 2},
}
# fp32 of two orders of summation: 1e-7 apart in each operation, and 20 steps of AdamW.
TOLERANCE = 1e-5


def loop(roles: str, orders: list[Seen], *, devices: int) -> dict[str, list[Seen]]:
    module = "tests.integrations.lightning_loop"
    printed = run_python("-m", module, roles, json.dumps(orders), devices=devices)
    return json.loads(printed.splitlines()[-1])


def assert_same_numbers(ours: Seen, plain: Seen) -> None:
    for name in ("losses", "logged", "lr"):
        assert ours[name] == pytest.approx(plain[name], rel=TOLERANCE), name
    # Between steps Lightning alone keeps the norm of the step before.
    norms = [norm for norm in plain["norms"] if norm]
    assert ours["norms"][-1] == pytest.approx(norms[-1], rel=TOLERANCE)
    assert ours["losses"][-1] < ours["losses"][0]
    assert len(ours["validated"]) == len(plain["validated"])
    for mine, its in zip(ours["validated"], plain["validated"], strict=True):
        assert mine == pytest.approx(its, rel=TOLERANCE)


def test_a_script_on_8_devices_has_the_numbers_of_lightning_alone():
    orders = [ORDERS["uneven"], ORDERS["evaluates first"]]
    seen = loop("plain,spmdzero", orders, devices=8)
    (plain, evaluated), (ours, by_us) = seen["plain"], seen["spmdzero"]
    # Without a fit, and so without a loader that says how many rows it has.
    for name in ("tested", "validated first", "predicted"):
        # A logit is a sum of 64 products, whose rounding stays where the sum is nearly 0.
        wanted = pytest.approx(flat(evaluated[name]), rel=TOLERANCE, abs=1e-6)
        assert flat(by_us[name]) == wanted, name
    # The fit that follows takes those of its own.
    assert by_us["rows"] == 16
    assert_same_numbers(by_us, evaluated)
    assert len(plain["validated"]) > 5
    assert plain["validated"][0].keys() == {
        *("val_accuracy", "val_right", "val_loss", "val_highest")
    }
    assert_same_numbers(ours, plain)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=TOLERANCE)
    # Logging and measuring in a step keep no step from being folded.
    if current().compiler is not None:
        assert ours["folding"] == [20, 0]
    # Each of two batch sizes was seen three times by then.
    assert len(set(ours["compiled"][9:])) == 1


def features(*names: str, devices: int = 8) -> dict[str, Any]:
    module = "tests.integrations.lightning_features"
    return json.loads(run_python("-m", module, *names, devices=devices).splitlines()[-1])


def flat(tree: Any) -> list[float]:
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree)]
    return [leaf for item in tree for leaf in flat(item)] if isinstance(tree, list) else [tree]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_every_way_to_configure_it_has_the_numbers_of_lightning_alone(devices: int):
    seen = loop("plain,spmdzero", list(ORDERS.values()), devices=devices)
    for plain, ours in zip(seen["plain"], seen["spmdzero"], strict=True):
        assert_same_numbers(ours, plain)


@pytest.mark.slow
def test_a_checkpoint_resumes_bit_for_bit_and_on_other_devices(tmp_path: Path):
    # Lightning alone shuffles anew when it resumes, and begins with the batch in whose hook it
    # saved, unless that ended the epoch.
    order = {"data": 37, "shuffle": False, "validate_every": 2}
    order |= {"folder": str(tmp_path), "save_at": 12}
    (straight,) = loop("spmdzero", [order], devices=8)["spmdzero"]
    resumed = order | {"resume": str(tmp_path / "12.ckpt"), "save_at": None}
    (again,) = loop("spmdzero", [resumed], devices=8)["spmdzero"]
    assert again["losses"] == straight["losses"][12:]
    assert again["lr"] == straight["lr"][12:]
    assert again["validated"] == straight["validated"][4:]
    assert len(again["losses"]) == 8
    (elsewhere,) = loop("spmdzero", [resumed], devices=2)["spmdzero"]
    assert elsewhere["losses"] == pytest.approx(straight["losses"][12:], rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("gas", [0, 1, 4])
def test_a_loop_of_fabrics_has_the_numbers_of_fabric_alone(gas: int, tmp_path: Path):
    module = ("-m", "tests.integrations.fabric_loop")
    plain, ours = (
        json.loads(run_python(*module, role, str(tmp_path), str(gas), devices=8).splitlines()[-1])
        for role in ("plain", "spmdzero")
    )
    assert len(ours["losses"]) == 16
    assert ours["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)
    assert ours["steps"] == 16 // (gas or 1)
    # What was saved after the first eight batches is there again.
    assert ours["batches"] == 8
    assert ours["resumed"] == ours["losses"][8:]
    assert ours["resumed"] == pytest.approx(plain["resumed"], rel=TOLERANCE)


@pytest.mark.slow
def test_precision_flags_are_those_of_deepspeeds_strategy():
    wanted = {
        "bf16-mixed": ("torch.bfloat16", [True, False]),
        "bf16-true": ("torch.bfloat16", [True, False]),
        "16-mixed": ("torch.float16", [False, True]),
    }
    # The scale starts at 2^16, and each overflow is a step that is skipped.
    orders = [{"precision": precision, "steps": 24} for precision in wanted]
    (exact,) = loop("plain", [{"steps": 24}], devices=1)["plain"]
    for seen, (dtype, enabled) in zip(
        loop("spmdzero", orders, devices=8)["spmdzero"], wanted.values(), strict=True
    ):
        assert (seen["dtype"], seen["enabled"]) == (dtype, enabled)
        # Half of the digits of the model's weights, for 24 steps: 2^-8 each way.
        assert seen["losses"][0] == pytest.approx(exact["losses"][0], rel=2**-7)
        assert seen["losses"][-1] == pytest.approx(exact["losses"][-1], rel=2**-4)
    assert "64-true" in features('{"precision": "64-true"}', devices=2)['{"precision": "64-true"}']


@pytest.mark.slow
def test_what_steps_do_beside_training_is_done_with_the_rows_of_all_devices():
    names = (
        *("ReturnsMetric", "Collects", "ReadsEpoch", "ReadsIndex", "ReadsList"),
        *("MaximumOfMetric", "SkipsStep", "Monitored", "MonitoredSchedule"),
    )
    seen = features(*names)
    for name in names:
        ours, plain = flat(seen[name]["ours"]), flat(seen[name]["plain"])
        assert ours == pytest.approx(plain, rel=TOLERANCE), name
        assert len(ours) > 5
    if current().compiler is None:
        # torch_xla's backend folds nothing.
        return
    folded = {name: seen[name]["folded"] for name in names}
    # What reads a number that is another at each step is traced at each step.
    assert folded.pop("ReadsIndex") == 0
    assert folded.pop("ReadsList") <= 1
    for name in ("SkipsStep", "Monitored", "MonitoredSchedule"):
        del folded[name]
    assert folded.pop("MaximumOfMetric") == 6
    assert folded == {"ReturnsMetric": 6, "Collects": 6, "ReadsEpoch": 12}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [False, True])
def test_rates_of_a_configs_optimizer_have_its_name(schedule: bool, tmp_path: Path):
    seen = features(f"named:{tmp_path}:{schedule}", devices=2)
    assert [*seen.values()] == [["lr-SGD"]]


@pytest.mark.slow
def test_what_can_not_work_says_what_does():
    wanted = {
        "ComputesWithMetric": "SpmdZeroUsageError: the step computes with what self.squared",
        "LogsCount": "ReplicaRegionError: output \"calls.0 self.log('positive')",
        "LogsSum": "SpmdZeroUsageError: self.log('sum', reduce_fx='sum')",
        "LogsMaximum": "SpmdZeroUsageError: self.log('maximum', reduce_fx='max')",
        "Gathers": "SpmdZeroUsageError: self.all_gather(...) inside of a step",
        "Manual": "SpmdZeroUsageError: automatic_optimization = False",
        '{"sync_batchnorm": true}': "SpmdZeroUsageError: Trainer(sync_batchnorm=True)",
        '{"devices": 4}': 'SpmdZeroUsageError: Trainer(strategy="spmdzero", devices=4)',
        '{"gradient_clip_algorithm": "value", "gradient_clip_val": 1.0}': "MisconfigurationExce",
    }
    seen = features(*wanted)
    for name, start in wanted.items():
        assert seen[name].startswith(start), (name, seen[name])


@pytest.mark.slow
def test_a_trained_module_is_on_the_cpu_and_its_trainer_can_still_save(tmp_path: Path):
    seen = features(f"after:{tmp_path}")[f"after:{tmp_path}"]
    assert seen == {"device": "cpu", "type": "Tensor", "same": True}
