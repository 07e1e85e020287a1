"""train_batch_size = micro x accumulation x devices, whichever of them the config holds."""

import itertools

import pytest

from spmdzero.config import BatchSizes, load_config, resolve_batch_sizes
from spmdzero.errors import SpmdZeroConfigError


def resolve(*, devices, train=None, micro=None, accumulation=None):
    config = load_config(
        {
            "train_batch_size": train,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
        }
    )
    return resolve_batch_sizes(config, dp_world_size=devices)


@pytest.mark.parametrize(
    "given",
    [
        {"train": 64, "micro": 4, "accumulation": 2},
        {"train": 64, "micro": 4},
        {"train": 64, "accumulation": 2},
        {"micro": 4, "accumulation": 2},
    ],
    ids=str,
)
def test_two_of_the_three_numbers_give_the_third(given):
    assert resolve(devices=8, **given) == BatchSizes(train=64, micro=4, accumulation=2)


def test_one_number_alone_means_no_accumulation():
    assert resolve(devices=8, train=32) == BatchSizes(train=32, micro=4, accumulation=1)
    assert resolve(devices=8, micro=4) == BatchSizes(train=32, micro=4, accumulation=1)


@pytest.mark.parametrize("accumulation", [None, 2])
def test_neither_batch_size_is_an_error(accumulation):
    with pytest.raises(SpmdZeroConfigError, match="neither train_batch_size nor train_micro"):
        resolve(devices=8, accumulation=accumulation)


def divisor(*, train, micro, accumulation, devices):
    """What the train size must be a multiple of; equal to it when all is given."""
    return (micro or 1) * (accumulation or 1) * devices


def test_every_case_is_resolved_exactly_when_the_numbers_divide():
    choices = [None, 1, 2, 3]
    for train, micro, accumulation in itertools.product(range(1, 25), choices, choices):
        for devices in (1, 2, 4):
            given = {"train": train, "micro": micro, "accumulation": accumulation}
            unit = divisor(**given, devices=devices)
            fits = train == unit if micro and accumulation else train % unit == 0
            if not fits:
                with pytest.raises(SpmdZeroConfigError):
                    resolve(**given, devices=devices)
                continue
            sizes = resolve(**given, devices=devices)
            assert sizes.train == train == sizes.micro * sizes.accumulation * devices
            assert micro in (None, sizes.micro)
            assert accumulation in (None, sizes.accumulation)
            if micro is None and accumulation is None:
                assert sizes.accumulation == 1


@pytest.mark.parametrize(
    ("given", "equation", "fix"),
    [
        (
            {"train": 33, "micro": 4},
            "train_batch_size (33) = micro (4) x accumulation (1) x devices (8)",
            "multiple of 32, such as 32 or 64",
        ),
        (
            {"train": 33},
            "train_batch_size (33) = micro (4) x accumulation (1) x devices (8)",
            "multiple of 8, such as 32 or 40",
        ),
        (
            {"train": 33, "accumulation": 2},
            "train_batch_size (33) = micro (2) x accumulation (2) x devices (8)",
            "multiple of 16, such as 32 or 48",
        ),
        (
            {"train": 4, "micro": 4},
            "train_batch_size (4) = micro (4) x accumulation (0) x devices (8)",
            "such as 32.",
        ),
        (
            {"train": 33, "micro": 4, "accumulation": 2},
            "train_batch_size (33) = micro (4) x accumulation (2) x devices (8)",
            "Write train_batch_size 64",
        ),
    ],
    ids=str,
)
def test_a_mismatch_names_all_numbers_and_what_to_write(given, equation, fix):
    with pytest.raises(SpmdZeroConfigError) as caught:
        resolve(devices=8, **given)
    assert equation in caught.value.reason
    assert fix in caught.value.fix
