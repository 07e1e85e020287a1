"""`utils.zero_to_fp32` on the module that an engine trains, as Hugging Face's pages call it."""

import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from spmdzero.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from torch import nn

import spmdzero
from tests.support import engines
from tests.support.processes import run_python

TOKENS = torch.arange(16).reshape(8, 2)


class Tied(nn.Module):
    """A head tied to its embedding, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.frozen = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.middle(torch.tanh(self.frozen(self.embed(tokens))))
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), tokens.flatten())


def start(model: nn.Module | None = None, **more: Any) -> spmdzero.Engine:
    usual = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    return engines.start(model or Tied(), **usual | more)


def train(engine: spmdzero.Engine) -> float:
    return engines.three_calls(engine, TOKENS).item()


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def assert_refused(engine: spmdzero.Engine, folder: Path) -> None:
    """Each call of an engine whose module has left the devices says so."""
    calls: list[Callable[[], Any]] = [
        lambda: engine(TOKENS),
        lambda: engine.train_batch(TOKENS),
        lambda: engine.save_checkpoint(folder),
        lambda: engine.save_16bit_model(folder),
        lambda: engine.load_checkpoint(folder),
    ]
    for call in calls:
        with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"embed\.weight.*initialize"):
            call()


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_live_engines_module_takes_the_checkpoint_and_is_plain_torch(
    stage: int, precision: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(zero_optimization={"stage": stage}, **precision)
    held = engine.module.embed.weight
    # What has a weak reference can't be exchanged in place (nn.LSTM has them).
    weakly = weakref.ref(engine.module.middle.weight)
    for _ in range(2):
        train(engine)
    engine.save_checkpoint(tmp_path)
    expected = weights(engine.module)
    train(engine)
    assert not torch.equal(weights(engine.module)["head.weight"], expected["head.weight"])

    caplog.clear()
    module = load_state_dict_from_zero_checkpoint(engine.module, tmp_path)
    assert module is engine.module
    assert held is module.embed.weight is module.head.weight
    assert module.middle.weight is not weakly()
    for name, parameter in module.named_parameters():
        assert (type(parameter), parameter.device.type) == (nn.Parameter, "cpu")
        assert parameter.requires_grad == ("frozen" not in name)
    for name, tensor in module.state_dict().items():
        # In the dtype that the module trains in, as DeepSpeed: the masters, rounded to bf16.
        assert torch.equal(tensor, expected[name]), name
        assert tensor.dtype == expected[name].dtype
    assert ("pass a fresh model" in caplog.text) == bool(precision)

    caplog.clear()
    module(TOKENS).backward()
    assert held.grad is not None
    assert caplog.messages == []
    assert_refused(engine, tmp_path)


def test_a_module_that_left_the_devices_goes_to_a_new_engine(tmp_path: Path) -> None:
    engine = start()
    before = weights(engine.module)
    first, *_ = [engine.train_batch(TOKENS).item() for _ in range(4)]
    train(engine)
    engine.save_checkpoint(tmp_path)
    engine.module.cpu()
    assert_refused(engine, tmp_path)
    engine.module.load_state_dict(before)
    assert_refused(engine, tmp_path)
    assert train(start(engine.module)) == first


def test_without_a_checkpoint_the_engine_stays_as_it_is(tmp_path: Path) -> None:
    engine = start()
    loss = train(engine)
    with pytest.raises(spmdzero.SpmdZeroCheckpointError):
        load_state_dict_from_zero_checkpoint(engine.module, tmp_path)
    assert train(engine) < loss


def test_a_tied_weight_is_one_tensor_under_both_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "spmdzero")
    engine = start()
    engine.save_checkpoint(tmp_path / "saved", tag="mine")
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "file", tag="mine")
    file = torch.load(tmp_path / "file" / "pytorch_model.bin", weights_only=True)
    for state in (get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved"), file):
        assert state["head.weight"] is state["embed.weight"]
        model = Tied()
        model.load_state_dict(state, strict=True)
        for name, tensor in weights(engine.module).items():
            assert torch.equal(model.state_dict()[name], tensor)


def test_the_script_in_a_folder_of_checkpoints_writes_their_weights(tmp_path: Path) -> None:
    engine = start()
    train(engine)
    # DeepSpeed's own, which reads none of our checkpoints, from a run that is resumed.
    (tmp_path / "zero_to_fp32.py").write_text("raise SystemExit(3)")
    engine.save_checkpoint(tmp_path, tag="first")
    first = weights(engine.module)
    train(engine)
    engine.save_checkpoint(tmp_path, tag="second")
    expected = weights(engine.module)
    assert not torch.equal(first["embed.weight"], expected["embed.weight"])

    script = tmp_path / "zero_to_fp32.py"
    assert os.access(script, os.X_OK)
    run_python(str(script), str(tmp_path), str(tmp_path / "out"))
    written = torch.load(tmp_path / "out/pytorch_model.bin")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)

    run_python(
        *(str(script), str(tmp_path), str(tmp_path / "safe"), "--tag", "first"),
        *("--safe_serialization", "--exclude_frozen_parameters"),
    )
    written = safetensors.torch.load_file(tmp_path / "safe/model.safetensors")
    assert torch.equal(written["embed.weight"], first["embed.weight"])
    assert "frozen.weight" not in written


def test_a_script_that_cant_be_written_leaves_the_save_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    train(engine)
    (tmp_path / "zero_to_fp32.py").mkdir()
    with caplog.at_level(logging.WARNING, "spmdzero"):
        engine.save_checkpoint(tmp_path)
    assert "zero_to_fp32.py can't be written" in caplog.text
    assert engine.load_checkpoint(tmp_path)[0] is not None
