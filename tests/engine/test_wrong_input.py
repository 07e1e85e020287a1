"""Mistakes that users make, each with an error that says what to do."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import spmdzero
from spmdzero import SpmdZeroConfigError, SpmdZeroUsageError
from tests.support.processes import environment


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    } | more


def make_engine(**more: Any) -> spmdzero.Engine:
    torch.manual_seed(0)
    engine, *_ = spmdzero.initialize(model=nn.Linear(4, 3), config=config(**more))
    return engine


def test_batch_sizes_that_do_not_multiply_name_all_numbers() -> None:
    with pytest.raises(SpmdZeroConfigError, match=r"33.*2.*8") as caught:
        make_engine(train_batch_size=33)
    assert caught.value.key == "train_batch_size"


def test_wrong_row_count_names_both_numbers() -> None:
    engine = make_engine()
    with pytest.raises(SpmdZeroUsageError, match=r"has 12 rows.*16 = .*\(2\) x 8 local devices"):
        engine(torch.zeros(12, 4))


def test_evaluation_takes_other_row_counts_that_devices_can_share() -> None:
    engine = make_engine().eval()
    with torch.no_grad():
        assert engine(torch.zeros(24, 4)).shape == (24, 3)
        with pytest.raises(SpmdZeroUsageError, match="12 rows, which 8 local devices can't share"):
            engine(torch.zeros(12, 4))


def test_missing_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "ds_config.json"
    with pytest.raises(SpmdZeroConfigError, match=str(missing)):
        spmdzero.initialize(model=nn.Linear(4, 3), config=str(missing))


def test_malformed_json_names_line_and_column(tmp_path: Path) -> None:
    broken = tmp_path / "ds_config.json"
    broken.write_text('{\n  "train_batch_size": 16,\n  "bf16": {"enabled": tru}\n}')
    with pytest.raises(SpmdZeroConfigError, match=r"line 3.*column 23"):
        spmdzero.initialize(model=nn.Linear(4, 3), config=str(broken))


@pytest.mark.parametrize(
    "zero",
    [{"stage": 3}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}],
    ids=["stage 3", "offload"],
)
def test_stage_3_and_offload_are_refused_with_an_alternative(zero: dict[str, Any]) -> None:
    with pytest.raises(SpmdZeroConfigError, match=r"[Uu]se|device|stage 2") as caught:
        make_engine(zero_optimization=zero)
    assert "zero_optimization" in caught.value.key
    assert caught.value.fix


def test_stage_3_says_that_spmdzero_is_zero_1_and_2() -> None:
    with pytest.raises(SpmdZeroConfigError, match=r"ZeRO-1 and ZeRO-2.*stage 2.*FSDPv2"):
        make_engine(zero_optimization={"stage": 3})


def test_an_unknown_key_gets_a_did_you_mean() -> None:
    with pytest.raises(SpmdZeroConfigError, match="gradient_clipping"):
        make_engine(gradient_cliping=1.0)


def test_backward_without_forward() -> None:
    engine = make_engine()
    with pytest.raises(SpmdZeroUsageError, match="without a forward"):
        engine.backward(torch.tensor(1.0))
    with torch.no_grad():
        loss = engine(torch.zeros(16, 4)).mean()
    with pytest.raises(SpmdZeroUsageError, match="without a forward"):
        engine.backward(loss)


def test_step_before_backward() -> None:
    with pytest.raises(SpmdZeroUsageError, match=r"before engine.backward\(loss\)"):
        make_engine().step()


def test_step_without_an_optimizer() -> None:
    engine, optimizer, loader, scheduler = spmdzero.initialize(
        model=nn.Linear(4, 3), config={"train_micro_batch_size_per_gpu": 2}
    )
    assert (optimizer, loader, scheduler) == (None, None, None)
    engine.backward(engine(torch.ones(16, 4)).mean())
    with pytest.raises(SpmdZeroUsageError, match="without an optimizer"):
        engine.step()


def test_a_loss_that_is_no_scalar() -> None:
    engine = make_engine()
    with pytest.raises(SpmdZeroUsageError, match=r"scalar loss, got \[16, 3\].*loss.mean\(\)"):
        engine.backward(engine(torch.ones(16, 4)))


def test_a_model_on_another_device() -> None:
    # Fake, so that it needs no such device.
    elsewhere = FakeTensor(FakeTensorMode(), torch.empty(3, 4, device="meta"), torch.device("cuda"))
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(elsewhere)
    with pytest.raises(SpmdZeroUsageError, match=r"weight is on cuda.*Build it on the CPU"):
        spmdzero.initialize(model=model, config=config())


def test_a_bf16_model_under_an_fp32_config() -> None:
    with pytest.raises(SpmdZeroUsageError, match=r"bfloat16, but the config asks for fp32"):
        spmdzero.initialize(model=nn.Linear(4, 3).bfloat16(), config=config())


def test_an_fp32_input_of_a_bf16_model_names_the_cast() -> None:
    engine = make_engine(bf16={"enabled": True})
    with pytest.raises(spmdzero.ReplicaRegionError, match=r"bfloat16 and float32. Cast the input"):
        engine(torch.ones(16, 4))


def test_a_wrong_shape_names_the_line_and_the_operation() -> None:
    engine = make_engine()
    with pytest.raises(spmdzero.ReplicaRegionError, match=r"test_wrong_input.py:\d+.*addmm"):
        engine(torch.ones(16, 5))


def test_no_module() -> None:
    with pytest.raises(SpmdZeroUsageError, match=r"needs a torch.nn.Module, got str"):
        spmdzero.initialize(model="gpt2", config=config())  # type: ignore[arg-type]


def test_a_parameter_of_another_model() -> None:
    with pytest.raises(SpmdZeroUsageError, match="not a parameter of the model"):
        spmdzero.initialize(
            model=nn.Linear(4, 3), model_parameters=nn.Linear(4, 3).parameters(), config=config()
        )


def test_a_schedule_that_could_change_nothing() -> None:
    model = nn.Linear(4, 3)
    stray = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(stray, 2)
    with pytest.raises(SpmdZeroUsageError, match="bound to an optimizer that was not passed"):
        spmdzero.initialize(model=model, lr_scheduler=schedule, config=config())
    with pytest.raises(SpmdZeroUsageError, match="schedule without an optimizer"):
        spmdzero.initialize(
            model=model, lr_scheduler=schedule, config={"train_micro_batch_size_per_gpu": 2}
        )


def test_data_that_ends_in_mid_step_leaves_an_engine_that_can_go_on() -> None:
    engine = make_engine(gradient_accumulation_steps=3)
    engine.module.forward = lambda x: nn.Linear.forward(engine.module, x).mean()
    with pytest.raises(SpmdZeroUsageError, match="ended after 2 of 3 micro-batches"):
        engine.train_batch(iter([torch.zeros(16, 4)] * 2))
    assert (engine.micro_steps, engine.global_steps) == (0, 0)
    engine.train_batch(iter([torch.ones(16, 4)] * 3))
    assert (engine.micro_steps, engine.global_steps) == (3, 1)


def test_train_batch_of_a_list_says_iter() -> None:
    with pytest.raises(SpmdZeroUsageError, match=r"got list: make an iterator with iter"):
        make_engine().train_batch([torch.zeros(16, 4)])  # type: ignore[arg-type]


def test_nothing_to_train() -> None:
    used_up = nn.Linear(4, 3).parameters()
    list(used_up)
    with pytest.raises(SpmdZeroUsageError, match="nothing to train"):
        spmdzero.initialize(model=nn.Linear(4, 3), model_parameters=used_up, config=config())
    frozen = nn.Linear(4, 3).requires_grad_(False)
    with pytest.raises(SpmdZeroUsageError, match="nothing to train"):
        spmdzero.initialize(model=frozen, config=config())


def test_named_parameters_instead_of_parameters() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(SpmdZeroUsageError, match=r"not model.named_parameters\(\)"):
        spmdzero.initialize(model=model, model_parameters=model.named_parameters(), config=config())


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_gradient_hook_is_refused_since_it_would_never_run(early: bool) -> None:
    model = nn.Linear(4, 3)
    if early:
        model.weight.register_hook(lambda grad: grad * 0)
        with pytest.raises(SpmdZeroUsageError, match="weight has a gradient hook"):
            spmdzero.initialize(model=model, config=config())
        return
    engine, *_ = spmdzero.initialize(model=model, config=config())
    engine.module.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(SpmdZeroUsageError, match="weight has a gradient hook"):
        engine(torch.ones(16, 4))


@pytest.mark.parametrize("as_buffer", [False, True], ids=["attribute", "new buffer"])
def test_a_tensor_that_forward_keeps_is_refused_since_its_use_would_abort(as_buffer: bool) -> None:
    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if as_buffer:
                self.register_buffer("auxiliary", x.mean())
            else:
                self.auxiliary = x.mean()
            return super().forward(x)

    engine, *_ = spmdzero.initialize(model=nn.Sequential(Keeps(4, 3)), config=config())
    with pytest.raises(spmdzero.ReplicaRegionError, match=r"attribute '0.auxiliary'.*return it"):
        engine(torch.ones(16, 4))


def test_plateau_asks_for_its_metric_before_the_update() -> None:
    engine = make_engine(scheduler={"type": "ReduceLROnPlateau", "params": {}})
    engine.backward(engine(torch.ones(16, 4)).mean())
    with pytest.raises(SpmdZeroUsageError, match=r"lr_kwargs=\{"):
        engine.step()
    engine.step(lr_kwargs={"metrics": 1.0})
    assert engine.global_steps == 1


def test_names_in_the_spmd_section_that_match_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SpmdZeroConfigError, match="forward has no input named nope"):
        make_engine(spmd={"batch_dim": {"nope": 1}})
    engine = make_engine(spmd={"outputs": {"los": "sum"}})
    with caplog.at_level("WARNING", logger="spmdzero"):
        engine(torch.ones(16, 4))
        engine(torch.ones(16, 4))
    assert len([r for r in caplog.records if "names los" in r.message]) == 1


def test_a_global_forward_refuses_another_communication_dtype() -> None:
    with pytest.raises(SpmdZeroConfigError, match="communication_data_type"):
        make_engine(communication_data_type="bf16", spmd={"forward": "global"})


def test_a_global_forward_says_that_autocast_leaves_the_wire_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    autocast = {"enabled": True, "dtype": "bfloat16"}
    with caplog.at_level("WARNING", logger="spmdzero"):
        make_engine(torch_autocast=autocast)
        assert not caplog.records
        make_engine(torch_autocast=autocast, spmd={"forward": "global"})
    assert "reduces gradients in their own dtype" in caplog.text


class TestNotFinite:
    def test_check_finite_raises_before_the_update(self) -> None:
        engine = make_engine(spmd={"check_finite": True})
        good, bad = torch.ones(16, 4), torch.full((16, 4), float("inf"))
        engine.backward(engine(good).mean())
        engine.step()
        before = engine.module.weight.cpu().clone()
        engine.backward(engine(bad).mean())
        with pytest.raises(spmdzero.NonFiniteError, match="at step 1: parameters and optimizer"):
            engine.step()
        assert torch.equal(engine.module.weight.cpu(), before)
        assert torch.isfinite(before).all()
        engine.backward(engine(good).mean())
        engine.step()
        assert engine.global_steps == 2
        assert torch.isfinite(engine.module.weight.cpu()).all()
        engine.backward(engine(bad).mean())
        with pytest.raises(spmdzero.NonFiniteError, match="at step 2"):
            engine.step()
        assert not engine.was_step_applied()

    def test_otherwise_the_log_names_the_step(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = make_engine(steps_per_print=3)
        for step in range(3):
            engine.backward((engine(torch.ones(16, 4)) * (torch.nan if step == 1 else 1.0)).mean())
            with caplog.at_level("INFO", logger="spmdzero"):
                engine.step()
        assert [r.message for r in caplog.records if "not finite at step 1" in r.message]

    def test_bf16_skips_the_update_as_deepspeed_does(self) -> None:
        engine = make_engine(bf16={"enabled": True})
        before = engine.module.weight.cpu().clone()
        engine.backward((engine(torch.ones(16, 4).bfloat16()) * torch.nan).mean())
        engine.step()
        assert torch.equal(engine.module.weight.cpu(), before)
        assert (engine.skipped_steps, engine.global_steps) == (1, 1)
        assert not engine.was_step_applied()
        engine.backward(engine(torch.ones(16, 4).bfloat16()).mean())
        engine.step()
        assert engine.skipped_steps == 1
        assert engine.was_step_applied()
        assert not torch.equal(engine.module.weight.cpu(), before)


def test_a_device_used_before_spmd_is_a_clear_error() -> None:
    program = (
        "import torch, torch_xla, spmdzero\n"
        "torch.zeros(2).to(torch_xla.device())\n"
        "spmdzero.initialize(model=torch.nn.Linear(4, 3), config={'train_batch_size': 8})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "SpmdZeroRuntimeError: an XLA device was used before SPMD" in done.stderr
