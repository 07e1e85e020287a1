import contextlib
import json
import pathlib
from typing import Any

import pytest
import torch

from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.optim import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    schedule_from_config,
)

# Recorded from DeepSpeed 0.19.8 by stepping its schedules: lr after construction and each step.
TABLES = json.loads((pathlib.Path(__file__).parents[1] / "data" / "lr_tables.json").read_text())
WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
OURS = (*WARMUPS, "OneCycle", "LRRangeTest")
CASES = list(TABLES)
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}


def make_optimizer(*lrs: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.zeros(1)], "lr": lr} for lr in lrs])


def make_schedule(case: str, optimizer: torch.optim.Optimizer) -> Any:
    name, _, params = case.partition(":")
    kwargs = json.loads(params)
    all_warmup = kwargs.get("total_num_steps", 1000) < kwargs.get("warmup_num_steps", 0)
    with pytest.warns(UserWarning, match="less than") if all_warmup else contextlib.nullcontext():
        return schedule_from_config(name, kwargs, optimizer)


def lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def betas(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    return [list(group["betas"]) for group in optimizer.param_groups]


def test_every_schedule_has_recorded_cases() -> None:
    assert {case.partition(":")[0] for case in CASES} == set(OURS)


@pytest.mark.parametrize("case", CASES)
def test_schedule_is_deepspeeds_to_the_last_bit(case: str) -> None:
    table = TABLES[case]
    optimizer = make_optimizer(table["base_lr"])
    schedule = make_schedule(case, optimizer)
    at_construction, *after_steps = table["rows"]
    assert lrs(optimizer) == [at_construction["lr"]]
    assert betas(optimizer) == [at_construction["betas"]]
    for row in after_steps:
        schedule.step()
        assert lrs(optimizer) == [row["lr"]]
        assert betas(optimizer) == [row["betas"]]
        assert schedule.get_last_lr() == [row["last_lr"]]
        assert schedule.get_lr() == [row["lr"]]
    assert schedule.state_dict() == table["state"]


@pytest.mark.parametrize("case", CASES)
def test_schedule_resumes_from_its_state(case: str) -> None:
    table = TABLES[case]
    optimizer = make_optimizer(table["base_lr"])
    schedule = make_schedule(case, optimizer)
    schedule.load_state_dict({"last_batch_iteration": 6})
    for row in table["rows"][8:]:  # row n has taken n steps, so it is at iteration n - 1
        schedule.step()
        assert lrs(optimizer) == [row["lr"]]
        assert betas(optimizer) == [row["betas"]]


@pytest.mark.parametrize("name", OURS)
def test_step_goes_to_the_iteration_it_is_given(name: str) -> None:
    case = next(case for case in CASES if case.partition(":")[0] == name)
    optimizer = make_optimizer(TABLES[case]["base_lr"])
    schedule = make_schedule(case, optimizer)
    schedule.step(5)
    assert lrs(optimizer) == [TABLES[case]["rows"][6]["lr"]]
    schedule.step()
    assert lrs(optimizer) == [TABLES[case]["rows"][7]["lr"]]


def test_each_group_has_its_own_warmup() -> None:
    optimizer = make_optimizer(1.0, 1.0)
    schedule = WarmupLR(optimizer, [0.0, 1.0], [2.0, 5.0], 4, "linear")
    assert lrs(optimizer) == [0.0, 1.0]
    schedule.step(2)
    assert lrs(optimizer) == [1.0, 3.0]


def test_warmup_ends_at_each_groups_own_lr_by_default() -> None:
    optimizer = make_optimizer(0.5, 0.25)
    WarmupLR(optimizer, warmup_num_steps=3).step(3)
    assert lrs(optimizer) == [0.5, 0.25]


def test_cosine_scales_each_groups_own_lr() -> None:
    optimizer = make_optimizer(0.5, 0.25)
    schedule = WarmupCosineLR(optimizer, 10, warmup_num_steps=4, warmup_type="linear")
    assert lrs(optimizer) == [0.0, 0.0]
    schedule.step(2)
    assert lrs(optimizer) == [0.25, 0.125]


def test_schedule_made_at_an_iteration_leaves_the_lr_alone() -> None:
    optimizer = make_optimizer(0.5)
    schedule = WarmupLR(optimizer, warmup_num_steps=4, last_batch_iteration=2)
    assert lrs(optimizer) == [0.5]
    with pytest.raises(SpmdZeroUsageError, match="step"):
        schedule.get_last_lr()


def test_decay_is_a_warmup_for_isinstance_as_in_deepspeed() -> None:
    schedule = WarmupDecayLR(make_optimizer(0.5), total_num_steps=10, warmup_num_steps=2)
    assert isinstance(schedule, WarmupLR)


@pytest.mark.parametrize("name", WARMUPS)
@pytest.mark.parametrize("steps", [0, -1, 2.5, "10"])
def test_warmup_num_steps_must_be_a_positive_integer(name: str, steps: object) -> None:
    params = {"warmup_num_steps": steps} | ({} if name == "WarmupLR" else {"total_num_steps": 9})
    with pytest.raises(SpmdZeroConfigError) as caught:
        schedule_from_config(name, params, make_optimizer(0.1))
    assert caught.value.key == "scheduler.params.warmup_num_steps"
    assert caught.value.value == steps


@pytest.mark.parametrize(
    ("name", "params", "key", "message"),
    [
        ("WarmupLR", {"warmup_max": 1.0}, "params.warmup_max", "'warmup_max_lr'"),
        ("WarmupDecayLR", {}, "params.total_num_steps", 'Add "total_num_steps"'),
        ("WarmupCosineLR", {}, "params.total_num_steps", 'Add "total_num_steps"'),
        ("WarmupCosineLR", {"total_num_steps": "auto"}, "params.total_num_steps", "a number"),
        ("WarmupCosineLR", {"total_num_steps": 2000, "cos_min_ratio": "0"}, "params.cos", "number"),
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, "params.warmup_max_lr", "1 param groups"),
        ("WarmupLR", {"warmup_min_lr": "auto"}, "params.warmup_min_lr", "a number"),
        ("WarmupLR", {"warmup_type": "linaer"}, "params.warmup_type", '"linear"'),
        ("StepLR", {"stepsize": 3}, "params.stepsize", "'step_size'"),
        ("StepLR", {}, "params.step_size", 'Add "step_size"'),
        ("LinearLR", {"start_factor": 7.0}, "params", "refuses"),
        ("LambdaLR", {"lr_lambda": 3}, "params", "LambdaLR("),
        ("WarmupCosinLR", {}, "type", "'WarmupCosineLR'"),
        ("CosineAnnealing", {}, "type", "'CosineAnnealingLR'"),
        ("Optimizer", {}, "type", "WarmupLR"),
        ("LRScheduler", {}, "type", "has this name"),
        ("OneCycle", {}, "params.cycle_min_lr", 'Add "cycle_min_lr"'),
        ("OneCycle", CYCLE | {"cycle_first_step_size": 0}, "params.cycle_first", "above 0"),
        ("OneCycle", CYCLE | {"cycle_second_step_size": -1}, "params.cycle_second", "from 0"),
        ("OneCycle", CYCLE | {"cycle_max_mom": [0.8, 0.9]}, "params.cycle_max_mom", "1 param"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "params.lr_range_test_step", "positive"),
        ("LRRangeTest", {"lr_range_test_min_lr": "1"}, "params.lr_range_test_min", "number"),
    ],
)
def test_scheduler_that_cannot_be_honoured_says_what_can(
    name: str, params: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(SpmdZeroConfigError) as caught:
        schedule_from_config(name, params, make_optimizer(0.1))
    assert caught.value.key.startswith(f"scheduler.{key}")
    assert message in str(caught.value)


def test_each_group_has_its_own_cycle() -> None:
    optimizer = make_optimizer(1.0, 1.0)
    schedule = OneCycle(
        optimizer, [0.0, 1.0], [2.0, 5.0], cycle_first_step_size=4, cycle_min_mom=[0.5, 0.25],
        cycle_max_mom=[0.75, 0.5],
    )  # fmt: skip
    assert (lrs(optimizer), betas(optimizer)) == ([0.0, 1.0], [[0.5, 0.99], [0.25, 0.99]])
    schedule.step(1)
    assert (lrs(optimizer), betas(optimizer)) == ([1.0, 3.0], [[0.625, 0.99], [0.375, 0.99]])
    assert schedule.get_mom() == [(0.625, 0.99), (0.375, 0.99)]


def test_one_cycle_of_an_optimizer_without_betas_moves_the_lr_only_and_says_so() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9)
    with pytest.warns(UserWarning, match='"cycle_momentum": false'):
        schedule = OneCycle(optimizer, 0.0, 2.0, cycle_first_step_size=4)
    schedule.step(1)
    assert (lrs(optimizer), optimizer.param_groups[0]["momentum"]) == ([1.0], 0.9)
    assert schedule.get_mom() is None


def test_range_test_starts_at_each_groups_own_lowest_lr() -> None:
    optimizer = make_optimizer(0.5, 0.25)
    schedule = LRRangeTest(optimizer, [1.0, 2.0], lr_range_test_step_size=4)
    assert lrs(optimizer) == [1.0, 2.0]
    schedule.step(3)
    assert lrs(optimizer) == [2.0, 4.0]


def test_any_torch_schedule_can_be_named() -> None:
    schedule = schedule_from_config("StepLR", {"step_size": 3, "gamma": 0.5}, make_optimizer(0.1))
    assert type(schedule) is torch.optim.lr_scheduler.StepLR
    assert (schedule.step_size, schedule.gamma) == (3, 0.5)
