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

pytestmark = pytest.mark.backends("any")

# Recorded from DeepSpeed 0.19.8 by stepping its schedules: lr after construction and each step.
TABLES = json.loads((pathlib.Path(__file__).parents[1] / "data" / "lr_tables.json").read_text())
OURS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
CASES = list(TABLES)


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


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_lr_that_is_a_tensor_stays_that_tensor_and_a_fresh_schedule_goes_on(
    shape: tuple[int, ...],
) -> None:
    for case in CASES:
        rows = TABLES[case]["rows"]
        saved: dict[str, int] | None = None
        for part in (rows[:8], rows[8:]):
            lr = torch.full(shape, TABLES[case]["base_lr"], dtype=torch.float64)
            optimizer = torch.optim.AdamW([torch.zeros(1)], lr=lr)
            schedule = make_schedule(case, optimizer)
            if saved is not None:
                schedule.load_state_dict(saved)
            for index, row in enumerate(part):
                if index or saved is not None:
                    schedule.step()
                assert optimizer.param_groups[0]["lr"] is lr, case
                assert (lr.shape, lr.dtype, lr.item()) == (shape, torch.float64, row["lr"]), case
            saved = schedule.state_dict()
        assert saved == TABLES[case]["state"]


@pytest.mark.parametrize("case", CASES)
def test_before_the_first_step_the_lr_is_what_the_groups_have(case: str) -> None:
    optimizer = make_optimizer(TABLES[case]["base_lr"])
    assert make_schedule(case, optimizer).get_lr() == lrs(optimizer)


def test_a_schedule_takes_an_object_that_has_an_optimizer() -> None:
    class Wrapper:
        optimizer = make_optimizer(0.5)

    schedule = WarmupLR(Wrapper(), warmup_num_steps=3)  # type: ignore[arg-type]
    schedule.step(3)
    assert schedule.optimizer is Wrapper.optimizer
    assert lrs(Wrapper.optimizer) == [0.5]
    with pytest.raises(SpmdZeroUsageError, match=r"torch\.optim\.Optimizer, got object"):
        WarmupLR(object())  # type: ignore[arg-type]


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


def test_an_unknown_curve_is_the_logarithmic_one_as_in_deepspeed() -> None:
    unknown, known = make_optimizer(0.5), make_optimizer(0.5)
    schedules = WarmupLR(unknown, warmup_type="cosine"), WarmupLR(known, warmup_type="log")
    assert schedules[0].warmup_type == "log"
    for schedule in schedules:
        schedule.step(7)
    assert lrs(unknown) == lrs(known) != [0.0]


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


def test_a_schedule_that_is_made_by_hand_checks_its_arguments_as_the_config_does() -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda o: WarmupLR(o, warmup_num_steps=0), "warmup_num_steps = 0"),
        (lambda o: WarmupDecayLR(o, "10"), "total_num_steps = '10': this is not a number"),
        (lambda o: WarmupLR(o, warmup_max_lr=[0.1, 0.2]), "2 values for 1 param groups"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_max_mom=[0.8, 0.9]), "2 values for 1 param groups"),
        (lambda o: OneCycle(o, 0.1, "0.2"), "cycle_max_lr = '0.2'"),
        (lambda o: LRRangeTest(o, "1"), "lr_range_test_min_lr = '1'"),
    ]
    for make, message in wrong:
        with pytest.raises(SpmdZeroConfigError, match=message):
            make(make_optimizer(0.1))
    with pytest.raises(TypeError, match="total_num_steps"):
        WarmupDecayLR(make_optimizer(0.1))  # type: ignore[call-arg]


def test_what_torchs_schedule_refuses_shows_its_signature() -> None:
    for name, params in (("LinearLR", {"start_factor": 7.0}), ("LambdaLR", {"lr_lambda": 3})):
        with pytest.raises(SpmdZeroConfigError, match=rf"{name} refuses them.*{name}\(optimizer"):
            schedule_from_config(name, params, make_optimizer(0.1))


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
