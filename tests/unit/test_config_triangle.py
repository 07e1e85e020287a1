"""train_batch_size = micro x accumulation x devices, whichever of them the config holds."""

import itertools

import pytest

from spmdzero.config import BatchSizes, load_config, resolve_batch_sizes
from spmdzero.errors import SpmdZeroConfigError

pytestmark = pytest.mark.backends("any")


def resolve(*, devices, train=None, micro=None, accumulation=None):
    config = load_config(
        {
            "train_batch_size": train,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
        }
    )
    return resolve_batch_sizes(config, dp_world_size=devices)


def test_two_of_the_three_numbers_give_the_third():
    given = {"train": 64, "micro": 4, "accumulation": 2}
    for missing in (None, "train", "micro", "accumulation"):
        left = {name: value for name, value in given.items() if name != missing}
        assert resolve(devices=8, **left) == BatchSizes(train=64, micro=4, accumulation=2)


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


def test_a_mismatch_names_all_numbers_and_what_to_write():
    rows = [
        ((33, 4, None), (4, 1), "multiple of 32, such as 32 or 64"),
        ((33, None, None), (4, 1), "multiple of 8, such as 32 or 40"),
        ((33, None, 2), (2, 2), "multiple of 16, such as 32 or 48"),
        ((4, 4, None), (4, 0), "such as 32."),
        ((33, 4, 2), (4, 2), "Write train_batch_size 64"),
        ((128, 4, 2), (4, 2), "Write gradient_accumulation_steps 4, which keeps the batch, or tr"),
    ]
    for (train, micro, accumulation), (as_micro, as_accumulation), fix in rows:
        with pytest.raises(SpmdZeroConfigError) as caught:
            resolve(devices=8, train=train, micro=micro, accumulation=accumulation)
        assert (
            f"train_batch_size ({train}) = micro ({as_micro}) x accumulation ({as_accumulation}) "
            "x devices (8)"
        ) in caught.value.reason
        assert fix in caught.value.fix


def fix_on(platform, devices, *, micro=8, **more):
    sizes = {"train_batch_size": 128, "train_micro_batch_size_per_gpu": micro}
    config = load_config(sizes | {"gradient_accumulation_steps": 2} | more)
    with pytest.raises(SpmdZeroConfigError) as caught:
        resolve_batch_sizes(config, dp_world_size=devices, platform=platform)
    return caught.value.fix


def test_too_few_cpu_devices_are_counted_with_the_way_to_pretend_more():
    said = fix_on("CPU", 1)
    assert said.startswith("There is 1 CPU device; `spmdzero run --devices 8 SCRIPT` pretends 8")
    assert "PJRT_DEVICE=CPU CPU_NUM_DEVICES=8" in said
    assert "gradient_accumulation_steps 16, which keeps the batch" in said
    shared = fix_on("CPU", 2, sequence_parallel_size=2)
    assert shared.startswith("There are 4 CPU devices; `spmdzero run --devices 16 SCRIPT`")
    # Chips aren't pretended, and no number of devices makes these sizes right.
    assert "--devices" not in fix_on("TPU", 1)
    assert "--devices" not in fix_on("CPU", 1, micro=3)
