"""What of a checkpoint is loaded, and what is said about the rest."""

import logging
from pathlib import Path

import pytest
import torch

import spmdzero
from spmdzero.backend import arrays, counters
from tests.checkpoint.runs import (
    assert_state,
    config,
    make_model,
    micro_batch,
    start,
    train,
    whole_state,
)

Saved = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    engine = start(config(2, bf16={"enabled": True}))
    train(engine, range(3))
    engine.save_checkpoint(folder, tag="first", client_state={"name": "first"})
    train(engine, range(3, 5))
    engine.save_checkpoint(folder, tag="second", client_state={"name": "second"})
    return folder, whole_state(engine)


@pytest.fixture(scope="module")
def other(saved: Saved) -> spmdzero.Engine:
    engine = start(config(2, bf16={"enabled": True}))
    train(engine, range(30, 32))
    return engine


def test_latest_is_loaded_unless_a_tag_is_named(saved: Saved, other: spmdzero.Engine) -> None:
    folder, state = saved
    assert other.load_checkpoint(folder) == (str(folder / "second"), {"name": "second"})
    assert_state(other, state)
    first = other.load_checkpoint(folder, tag="first")
    assert first == (str(folder / "first"), {"name": "first"})
    assert other.global_steps == 3


def test_after_a_load_the_next_step_is_the_program_that_was_compiled_before(
    saved: Saved, other: spmdzero.Engine
) -> None:
    other.load_checkpoint(saved[0])
    before = counters.compiled()[0]
    micro_batch(other, 40)
    assert counters.compiled()[0] == before
    shards = arrays.local_shards(other.named_tensors()["exp_avg/odd.weight"])
    assert {tuple(shard.shape) for shard in shards} == {(7, 3)}


def test_module_only_leaves_everything_else(saved: Saved, other: spmdzero.Engine) -> None:
    folder, state = saved
    other.load_checkpoint(folder, tag="first")
    micro_batch(other, 41)
    steps, lr = other.global_steps, other.get_lr()
    before = whole_state(other)
    other.load_checkpoint(folder, load_module_only=True)
    assert (other.global_steps, other.get_lr()) == (steps, lr)
    for name, found in whole_state(other).items():
        if name.startswith(("parameter/", "buffer/")):
            assert torch.equal(found, state[name]), name
        elif name.startswith("master/"):
            # As DeepSpeed: masters are made of the 16-bit parameters that were loaded.
            parameter = state[f"parameter/{name.removeprefix('master/')}"]
            assert torch.equal(found, parameter.float()), name
        else:
            assert torch.equal(found, before[name]), name


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_module_only_within_a_step_keeps_its_gradients_as_deepspeed_does(
    stage: int, tmp_path: Path
) -> None:
    engine = start(config(stage, gas=2))
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    train(engine, range(3, 4))
    undisturbed = whole_state(engine)
    engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert not engine.is_first_micro_batch()
    train(engine, range(3, 4))
    assert engine.global_steps == 2
    assert_state(engine, undisturbed)


def test_without_optimizer_states_counters_are_taken_over_and_the_schedule_if_asked(
    saved: Saved, other: spmdzero.Engine
) -> None:
    folder, _ = saved
    other.load_checkpoint(folder, tag="first")
    micro_batch(other, 42)
    moments = {k: v for k, v in whole_state(other).items() if k.startswith("exp_avg")}
    schedule = other.lr_scheduler.state_dict()
    without = {"load_optimizer_states": False}
    other.load_checkpoint(folder, load_lr_scheduler_states=False, **without)
    assert other.lr_scheduler.state_dict() == schedule
    other.load_checkpoint(folder, **without)
    assert other.global_steps == 5
    assert other.lr_scheduler.state_dict()["last_batch_iteration"] == 4
    after = whole_state(other)
    assert all(torch.equal(after[name], moment) for name, moment in moments.items())


def test_a_custom_function_loads_the_module(saved: Saved, other: spmdzero.Engine) -> None:
    folder, state = saved
    seen: dict[str, torch.Tensor] = {}

    def load(*, src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        seen.update(src)
        with torch.no_grad():
            dst.head.bias.copy_(src["head.bias"] + 1)

    other.load_checkpoint(folder, custom_load_fn=load, load_module_only=True)
    assert seen.keys() == other.module.state_dict().keys()
    assert torch.equal(seen["odd.weight"], state["parameter/odd.weight"])
    assert torch.equal(other.module.head.bias.cpu(), state["parameter/head.bias"] + 1)


def test_a_custom_function_that_fails_leaves_the_module_as_it_was(
    saved: Saved, other: spmdzero.Engine
) -> None:
    other.load_checkpoint(saved[0])
    before = whole_state(other)

    def load(*, src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        with torch.no_grad():
            dst.head.bias.zero_()
        raise KeyError("renamed")

    with pytest.raises(KeyError, match="renamed"):
        other.load_checkpoint(saved[0], tag="first", custom_load_fn=load)
    assert_state(other, before)


class Longer(torch.nn.Module):
    """The saved model with a layer more and a layer less."""

    def __init__(self) -> None:
        super().__init__()
        model = make_model()
        self.body, self.odd, self.middle = model.body, model.odd, model.middle
        self.tail = torch.nn.Linear(13, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.tail(self.middle(self.odd(self.body(x.to(self.tail.weight.dtype)))))
        return ((z.squeeze(-1) - y) ** 2).mean()


def test_another_model_is_loaded_where_it_fits_and_the_rest_is_reported(
    saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    folder, state = saved
    engine, *_ = spmdzero.initialize(model=Longer(), config=config(2, bf16={"enabled": True}))
    before = whole_state(engine)
    with pytest.raises(spmdzero.SpmdZeroCheckpointError, match="another model") as caught:
        engine.load_checkpoint(folder)
    assert caught.value.newest == "first"
    assert "tail.weight" in str(caught.value)
    assert "head.weight" in str(caught.value)
    assert_state(engine, before)
    with caplog.at_level(logging.WARNING, "spmdzero"):
        engine.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False)
    assert engine.load_report is not None
    assert engine.load_report.missing == ("tail.bias", "tail.weight")
    assert engine.load_report.unexpected == ("head.bias", "head.weight")
    assert "tail.weight" in caplog.text
    assert torch.equal(engine.module.odd.weight.cpu(), state["parameter/odd.weight"])


def test_another_optimizer_is_refused_by_the_states_that_it_lacks(
    saved: Saved,
) -> None:
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    engine = start(
        config(2, bf16={"enabled": True}, optimizer=sgd, zero_allow_untested_optimizer=True)
    )
    with pytest.raises(spmdzero.SpmdZeroCheckpointError, match=r"exp_avg.*momentum"):
        engine.load_checkpoint(saved[0])
    path, _ = engine.load_checkpoint(saved[0], load_optimizer_states=False)
    assert path is not None


def test_frozen_parameters_can_be_left_out_and_keep_their_values(tmp_path: Path) -> None:
    def frozen() -> spmdzero.Engine:
        model = make_model()
        model.odd.weight.requires_grad_(False)
        return spmdzero.initialize(model=model, config=config(2))[0]

    engine = frozen()
    train(engine, range(1))
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    other = frozen()
    other.load_checkpoint(tmp_path)
    assert other.load_report is not None
    assert other.load_report.missing == ()
    assert torch.equal(other.module.odd.weight.cpu(), engine.module.odd.weight.cpu())
    assert torch.equal(other.module.head.weight.cpu(), engine.module.head.weight.cpu())


def test_nothing_saved_yet_returns_nothing(
    other: spmdzero.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "spmdzero"):
        assert other.load_checkpoint(tmp_path / "new") == (None, None)
    assert "latest" in caplog.text


class NotData:
    pass


def test_what_can_not_be_saved_is_refused_by_name(other: spmdzero.Engine, tmp_path: Path) -> None:
    for tag in ("a/b", ".hidden", ""):
        for save in (other.save_checkpoint, other.save_deepspeed_checkpoint):
            with pytest.raises(spmdzero.SpmdZeroUsageError, match="a folder"):
                save(tmp_path, tag=tag)
    # It would run code when it is read.
    with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"client_state\['args'\]\[1\].*NotData"):
        other.save_checkpoint(tmp_path, client_state={"step": 1, "args": [2, NotData()]})
    assert not list(tmp_path.glob("*/*"))
