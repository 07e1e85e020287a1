"""What public scripts ask of an engine and of its optimizer, besides what classes tell."""

from typing import Any

import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.compat.refusals import ATTRIBUTES
from spmdzero.errors import RefusedNameError, SpmdZeroUsageError
from tests.support import engines
from tests.support.engines import three_calls

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
    "bf16": {"bf16": {"enabled": True}},
    "fp32": {},
}
SGD = {"type": "SGD", "params": {"lr": 0.5}}


def start(**more: Any) -> Any:
    torch.manual_seed(0)
    sgd = {"optimizer": SGD, "zero_allow_untested_optimizer": True}
    return engines.start(engines.Squares(64), **sgd | more)


def batch() -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return {name: start(**more) for name, more in PRECISIONS.items()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_scale_is_read_by_every_name(made: dict[str, Any], precision: str) -> None:
    optimizer, scale = made[precision].optimizer, 128.0 if precision == "fp16" else 1.0
    assert optimizer.loss_scaler.loss_scale == optimizer.loss_scaler.cur_scale == scale
    assert optimizer.loss_scale == optimizer.cur_scale == scale
    # Of a scale that doesn't move DeepSpeed says no, too.
    assert (optimizer.needs_scaler(), optimizer.custom_loss_scaler) == (False, False)
    assert optimizer.external_loss_scale is None
    assert optimizer.loss_scaler.dynamic is False
    # As Lightning's users write it; without fp16 nothing overflows at any scale.
    optimizer.loss_scaler.raise_error_at_min_scale = False


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_only_fp16_has_a_loss_scale_to_set(made: dict[str, Any], precision: str) -> None:
    optimizer = made[precision].optimizer
    with pytest.raises(SpmdZeroUsageError, match="only fp16 has a loss scale"):
        optimizer.loss_scaler.cur_scale = 8.0
    with pytest.raises(SpmdZeroUsageError, match="only fp16 has a loss scale"):
        optimizer.override_loss_scale(8.0)


def test_an_overriding_loss_scale_reaches_the_step_and_the_unscaling() -> None:
    engine = start(fp16={"enabled": True, "loss_scale": 128}, gradient_clipping=0.0)
    three_calls(engine, batch())
    norm, before = engine.get_global_grad_norm(), engine.module.line.weight.detach().cpu().clone()
    engine.optimizer.override_loss_scale(2.0**40)
    assert engine.optimizer.loss_scale == engine.cur_scale == 2.0**40
    assert engine.optimizer.needs_scaler()
    # The scaler's own rules go on for themselves, as in DeepSpeed.
    assert engine.optimizer.loss_scaler.loss_scale == 128
    three_calls(engine, batch())
    assert engine.skipped_steps == 1
    assert torch.equal(engine.module.line.weight.detach().cpu(), before)
    engine.optimizer.override_loss_scale(1024.0)
    three_calls(engine, batch())
    assert engine.skipped_steps == 1
    # The same unscaled gradient as with 128, but for what one step of SGD has changed.
    assert 0.5 * norm < engine.get_global_grad_norm() < norm


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_refreshed_masters_keep_what_was_written_into_parameters(precision: str) -> None:
    still = {"type": "SGD", "params": {"lr": 0.0}}
    engine = start(**PRECISIONS[precision], optimizer=still)
    with torch.no_grad():
        engine.module.line.weight.fill_(1.0)
    engine.optimizer.refresh_fp32_params()
    three_calls(engine, batch())
    assert torch.all(engine.module.line.weight.detach().cpu() == 1.0)


def test_the_learning_rate_is_set_for_all_groups_and_the_next_step_takes_it() -> None:
    engine = start(gradient_clipping=0.0)
    engine.optimizer.set_lr(0.0)
    assert (engine.optimizer.get_lr(), engine.get_lr()) == (0.0, [0.0])
    before = engine.module.line.weight.detach().cpu().clone()
    three_calls(engine, batch())
    assert torch.equal(engine.module.line.weight.detach().cpu(), before)
    assert engine.optimizer._global_grad_norm == engine.get_global_grad_norm() > 0


def test_the_engine_answers_to_deepspeeds_attributes(made: dict[str, Any]) -> None:
    engine = made["bf16"]
    assert engine.basic_optimizer is engine.optimizer.optimizer is engine.optimizer
    # As older transformers write it.
    engine.optimizer.optimizer = None
    with pytest.raises(SpmdZeroUsageError, match="initialize"):
        engine.optimizer.optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    assert engine._config.zero_config.stage == engine._config.zero_optimization_stage == 2
    assert engine._config.bfloat16_config.enabled
    assert engine._config.train_batch_size == engine.train_batch_size() == 8
    assert engine._config._param_dict == engine.config
    assert (engine.mpu, engine.sequence_parallel_size) == (None, 1)
    assert engine.gradient_average
    assert engine.optimizer.clip_grad == 1.0
    engine.tput_timer.update_epoch_count()
    assert (engine.tput_timer.epoch_count, engine.tput_timer.batch_size) == (1, 8)
    assert engine.data_parallel_group is spmdzero.comm.get_world_group()


def test_a_timer_that_times_nothing_says_so_once(
    made: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    timer = made["bf16"].tput_timer
    caplog.set_level("INFO", logger="spmdzero")
    timer.start()
    timer.stop(global_step=True)
    timer.steps_per_output = 10
    assert caplog.text.count("wall_clock_breakdown") == 1
    with pytest.raises(AttributeError, match="wall_clock_breakdown"):
        timer.avg_samples_per_sec()


def test_what_is_refused_says_why_and_hasattr_says_no(made: dict[str, Any]) -> None:
    owners = {"engine": made["fp32"], "optimizer": made["fp32"].optimizer}
    for path, refusal in ATTRIBUTES.items():
        owner, _, name = path.partition(".")
        assert not hasattr(owners[owner], name), path
        with pytest.raises(RefusedNameError) as caught:
            getattr(owners[owner], name)
        assert str(caught.value) == f"{path}: {refusal.reason}. {refusal.instead}"
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = made["fp32"].optimizer.no_such_name


def test_the_profiler_of_the_config_keeps_its_numbers() -> None:
    engine = start(flops_profiler={"enabled": True, "profile_step": 1, "output_file": "/dev/null"})
    for _ in range(3):
        three_calls(engine, batch())
    # A product of [1, 64] and [64, 64] and a bias, in operations of a multiplication and a sum.
    assert engine.flops_profiler.get_total_flops() == 2 * 64 * 64


def test_the_package_answers_to_deepspeeds_names() -> None:
    parts = (spmdzero.__version_major__, spmdzero.__version_minor__, spmdzero.__version_patch__)
    assert ".".join(map(str, parts)) == spmdzero.__version__
    assert spmdzero.__git_hash__ == spmdzero.__git_branch__ == "unknown"
    assert spmdzero.dist is spmdzero.comm
    from spmdzero.git_version_info import version

    assert version == "0.19.8"
