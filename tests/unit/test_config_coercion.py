"""Ints and strings where old files have them: what DeepSpeed's own sections make of a value."""

from collections.abc import Callable

import pytest

from spmdzero.config import SpmdZeroConfig, load_config
from spmdzero.errors import SpmdZeroConfigError

pytestmark = pytest.mark.backends("any")


def load(**keys: object) -> SpmdZeroConfig:
    return load_config({"train_batch_size": 8, **keys})


def test_a_boolean_of_the_top_level_may_be_0_or_1_but_nothing_else() -> None:
    for written in (1, 0, True):
        assert load(zero_allow_untested_optimizer=written).zero_allow_untested_optimizer is bool(
            written
        )
    # DeepSpeed takes the string "false" for true there.
    for wrong in (2, -1, "true", 1.0, "1"):
        with pytest.raises(SpmdZeroConfigError, match="true or false"):
            load(zero_allow_untested_optimizer=wrong)


VALUES = [0, 1, 2, -1, 3.0, 1.5, "3", "1e-3", "1e3", "true", "False", "yes", "abc", "", True, False]
SECTIONS = {
    "fp16": ("enabled", "loss_scale", "initial_scale_power", "hysteresis", "min_loss_scale"),
    "bf16": ("enabled", "check_grad_overflow"),
    "zero_optimization": ("overlap_comm", "allgather_partitions"),
}


FLAGS = ("enabled", "check_grad_overflow", "overlap_comm", "allgather_partitions")


def outcome(read: Callable[[], object]) -> object:
    """What is read, None where it is refused."""
    try:
        return read()
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("section", "key"), [(section, key) for section, keys in SECTIONS.items() for key in keys]
)
def test_a_section_reads_a_value_as_deepspeed_does_or_refuses_it(section: str, key: str) -> None:
    config = pytest.importorskip("deepspeed.runtime.precision_config")
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    models = {
        "fp16": config.DeepSpeedFP16Config,
        "bf16": config.DeepSpeedBF16Config,
        "zero_optimization": zero.DeepSpeedZeroConfig,
    }
    read = 0
    for value in VALUES:
        theirs = outcome(lambda value=value: getattr(models[section](**{key: value}), key))
        ours = outcome(
            lambda value=value: getattr(getattr(load(**{section: {key: value}}), section), key)
        )
        if ours is None:
            # A boolean is no number, and a number that nothing can be done with isn't taken.
            out_of_range = key not in FLAGS and not isinstance(value, str)
            assert theirs is None or isinstance(value, bool) or out_of_range, value
        else:
            assert (ours, type(ours)) == (theirs, type(theirs)), value
            read += 1
    assert read > 2


@pytest.mark.parametrize("off", [False, 0])
def test_what_is_off_may_be_off_by_0(off: object) -> None:
    load(zero_optimization={"stage": 2, "cpu_offload": off}, autotuning={"enabled": off})
    load(elasticity={"enabled": off}, data_efficiency=off)
    offload = load(zero_optimization={"stage": 2, "cpu_offload": 1}).zero_optimization
    assert offload.offload_optimizer.device == "cpu"


def test_an_optimizers_numbers_are_taken_as_they_are_written() -> None:
    assert load(optimizer={"type": "Adam", "params": {"adam_w_mode": 0}}).optimizer is not None
    with pytest.raises(SpmdZeroConfigError, match=r"optimizer\.params\.lr"):
        load(optimizer={"type": "Adam", "params": {"lr": "1e-3"}})
