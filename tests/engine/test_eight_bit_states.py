"""Optimizer states in 8 bits: bitsandbytes' codes, as shards, in files and in memory."""

import functools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import spmdzero
from spmdzero.backend import arrays, runtime
from spmdzero.compat.tensor_fragment import (
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
)
from spmdzero.config import load_config
from spmdzero.engine import plan_of
from spmdzero.errors import SpmdZeroCheckpointError, SpmdZeroConfigError
from spmdzero.formats import Conversion, convert
from spmdzero.inspect import measure
from spmdzero.plan import Role
from tests.oracle import eight_bit_states as recorded
from tests.support import engines

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

NAMES = ("exp_avg", "exp_avg_sq")


class Net(nn.Module):
    """Weights of all kinds of blocks on 8 devices.

    Rows of 256 split by rows and by columns, rows that 256 doesn't divide, a flat one, and two that
    are too small.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Linear(256, 64)
        self.columns = nn.Linear(64, 300, bias=False)
        self.odd = nn.Linear(300, 17, bias=False)
        self.last = nn.Linear(17, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of rows `[n, 256]`."""
        hidden = torch.tanh(self.columns(torch.tanh(self.rows(x))))
        return self.last(torch.tanh(self.odd(hidden))).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 256, generator=torch.manual_seed(step))


def start(
    type_: str = "AdamW8bit", *, stage: int = 2, zero: dict[str, Any] | None = None, **more: Any
) -> spmdzero.Engine:
    optimizer = {"type": type_, "params": {"lr": 3e-3, "weight_decay": 0.01}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} | (zero or {})
    return engines.start(Net(), optimizer=optimizer, zero_optimization=zero, **more)


def train(engine: spmdzero.Engine, first: int, last: int) -> list[float]:
    return [engines.three_calls(engine, batch(step)).item() for step in range(first, last)]


def state(engine: spmdzero.Engine) -> dict[str, torch.Tensor]:
    runtime.wait()
    return {
        name: arrays.read(tensor.detach())
        for name, tensor in engine.named_tensors().items()
        if not name.startswith("buffer/")
    }


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == [], different


class Recorded(nn.Module):
    """A weight whose gradient is what the rows say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(recorded.weight())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The loss, by which the weight's gradient is the mean of the rows."""
        return (self.weight.reshape(-1) * rows.mean(0)).sum()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("type_", recorded.OPTIMIZERS)
def test_weights_and_codes_are_bitsandbytes(type_: str, stage: int) -> None:
    engine = engines.start(
        Recorded(),
        gradient_clipping=0.0,
        optimizer={"type": type_, "params": recorded.PARAMS},
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
    )
    for step in range(recorded.STEPS):
        engines.three_calls(engine, recorded.gradient(step).reshape(1, -1).repeat(8, 1))
    known, found = np.load(recorded.DATA), state(engine)
    # Both are six updates in fp32, of up to lr each; where a code is a neighbour, 1 / 64 of one.
    theirs = torch.from_numpy(known[f"{type_}/weight"])
    apart = (found["parameter/weight"] - theirs).abs()
    assert apart.max() < recorded.PARAMS["lr"] / 32
    assert (apart > 1e-6).float().mean() < 1e-3
    for number, slot in enumerate(NAMES[: 1 if "Lion" in type_ else 2], start=1):
        codes = torch.from_numpy(known[f"{type_}/state{number}"]).int()
        # A rounding apart a value may be on the other side of the middle of two codes.
        differ = (found[f"{slot}/weight"].int() - codes).abs()
        assert differ.max() <= 1
        assert differ.float().mean() < 1e-3
        scales = torch.from_numpy(known[f"{type_}/absmax{number}"]).reshape(64, 1, 1)
        torch.testing.assert_close(found[f"{slot}_absmax/weight"], scales, rtol=1e-5, atol=0)


@functools.cache
def losses(type_: str) -> list[float]:
    return train(start(type_), 0, 6)


def test_training_is_that_of_states_in_fp32_within_what_codes_lose() -> None:
    coded, plain = losses("AdamW8bit"), losses("AdamW")
    assert coded[0] == plain[0]
    assert coded != plain
    # A code is within 1 / 128 of its group's largest value, which is up to a tenth of a value.
    assert coded == pytest.approx(plain, rel=0.1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_devices_hold_what_the_plan_says_a_quarter_of_fp32(stage: int) -> None:
    engine = start(stage=stage)
    train(engine, 0, 1)
    found, plain = measure(engine), start("AdamW", stage=stage).plan
    assert found[Role.MOMENT] == engine.plan.memory()[Role.MOMENT]
    assert engine.plan.compare().stages[stage] == engine.plan.memory()
    assert found[Role.MOMENT] < 0.4 * plain.memory()[Role.MOMENT]
    codes = engine.named_tensors()["exp_avg/rows.weight"]
    assert codes.dtype == torch.uint8
    assert set(arrays.local_shapes(codes)) == {(64, 256) if stage == 0 else (8, 256)}


def test_codes_cross_no_wire() -> None:
    def crossed(type_: str) -> dict[str, int]:
        engine = start(type_)
        with spmdzero.record_ledgers(engine) as ledgers:
            train(engine, 0, 1)
        found: dict[str, int] = {}
        for collective in ledgers.boundary.collectives:
            found[collective.kind] = found.get(collective.kind, 0) + collective.wire_bytes
        return found

    coded = crossed("AdamW8bit")
    assert coded == crossed("AdamW")
    assert coded


def test_a_skipped_step_keeps_every_code() -> None:
    engine = start(bf16={"enabled": False})
    train(engine, 0, 2)
    before = state(engine)
    engines.three_calls(engine, torch.full((8, 256), math.nan))
    assert engine.skipped_steps == 1
    after = state(engine)
    assert torch.equal(after.pop("counter/skipped"), before.pop("counter/skipped") + 1)
    assert_same(after, before)


def test_one_call_is_the_three_calls() -> None:
    engine = start()
    found = [engines.one_call(engine, batch(step)).item() for step in range(6)]
    # Programs that add in another order; a code that is a neighbour is 1 / 64 of an update.
    assert found == pytest.approx(losses("AdamW8bit"), rel=1e-4)


def test_codes_and_scales_rest_on_the_host_where_states_do() -> None:
    config = engines.config(optimizer={"type": "AdamW8bit", "params": {}})
    here = plan_of(load_config(config), Net(), devices=8)
    there = here.with_states_on_host()
    assert there.at_rest("exp_avg_absmax/rows.weight").on_host
    on_host = dict(there.memory().on_host)[Role.MOMENT]
    assert on_host + there.memory()[Role.MOMENT] == here.memory()[Role.MOMENT]
    # What is small stays on the devices, and has no codes.
    assert there.memory()[Role.MOMENT] == 2 * 4 * (64 + 17 + 1)
    engine = start(zero={"offload_optimizer": {"device": "cpu"}})
    assert train(engine, 0, 3) == losses("AdamW8bit")[:3]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after three steps, as tag "three"."""
    folder = tmp_path_factory.mktemp("saved")
    engine = start()
    train(engine, 0, 3)
    engine.save_checkpoint(folder, tag="three")
    return folder


def after(engine: spmdzero.Engine, folder: Path, tag: str | None = None) -> list[float]:
    engine.load_checkpoint(folder, tag=tag)
    return train(engine, 3, 6)


def test_a_checkpoint_has_codes_and_the_run_goes_on_exactly(saved: Path) -> None:
    engine = start()
    train(engine, 0, 3)
    loaded = start()
    loaded.load_checkpoint(saved, tag="three")
    assert_same(state(loaded), state(engine))
    assert train(loaded, 3, 6) == losses("AdamW8bit")[3:]


def test_a_checkpoint_goes_to_fp32_and_back(saved: Path, tmp_path: Path) -> None:
    on = losses("AdamW8bit")[3:]
    plain = start("AdamW")
    # Its first step is from the same values; later ones round no more.
    assert after(plain, saved) == pytest.approx(on, rel=1e-2)
    plain = start("AdamW")
    plain.load_checkpoint(saved)
    plain.save_checkpoint(tmp_path, tag="values")
    # Values of codes become the same codes.
    assert after(start(), tmp_path) == pytest.approx(on, rel=1e-5)
    # At stage 0 other elements share a scale.
    assert after(start(stage=0), saved) == pytest.approx(on, rel=1e-2)


def test_deepspeeds_files_have_the_values(saved: Path, tmp_path: Path) -> None:
    on = losses("AdamW8bit")[3:]
    convert(saved, tmp_path, Conversion(to="universal"))
    universal = {"checkpoint": {"load_universal": True}}
    assert after(start(**universal), tmp_path) == pytest.approx(on, rel=1e-5)
    assert after(start("AdamW", **universal), tmp_path) == pytest.approx(on, rel=1e-2)


def test_a_damaged_part_of_what_is_decoded_is_found(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    (file,) = sorted((tmp_path / "copy" / "three").glob("*.safetensors"))[:1] or [None]
    assert file is not None
    content = bytearray(file.read_bytes())
    content[-5] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(SpmdZeroCheckpointError):
        start("AdamW").load_checkpoint(tmp_path / "copy", tag="three")


def test_an_optimizers_state_dict_has_values() -> None:
    first, second = start(), start()
    train(first, 0, 3)
    saved = first.optimizer.state_dict()
    assert saved["state"][0].keys() == {"step", *NAMES}
    assert saved["state"][0]["exp_avg"].dtype == torch.float32
    train(second, 0, 3)
    second.optimizer.load_state_dict(saved)
    assert_same(
        {name: tensor for name, tensor in state(second).items() if "absmax" not in name},
        {name: tensor for name, tensor in state(first).items() if "absmax" not in name},
    )


def test_states_are_read_and_written_as_values() -> None:
    engine = start()
    train(engine, 0, 2)
    for name in ("rows.weight", "odd.weight"):
        parameter = engine.module.get_parameter(name)
        for slot in NAMES:
            value = safe_get_full_optimizer_state(parameter, slot)
            assert (tuple(value.shape), value.dtype) == (tuple(parameter.shape), torch.float32)
            safe_set_full_optimizer_state(parameter, value * 2, slot)
            again = safe_get_full_optimizer_state(parameter, slot)
            torch.testing.assert_close(again.cpu(), value.cpu() * 2, rtol=1e-6, atol=0)
    before = state(engine)
    # The padding of a flat tensor has no part in the scale of its block.
    engines.three_calls(engine, batch(2))
    scale = state(engine)["exp_avg_absmax/odd.weight"][-1, -1]
    assert scale < before["exp_avg_absmax/odd.weight"][-1, -1] * 2


def test_a_paged_name_is_the_same_and_the_least_size_is_a_choice() -> None:
    def sizes(type_: str, **params: Any) -> list[str]:
        config = engines.config(optimizer={"type": type_, "params": params})
        plan = plan_of(load_config(config), Net(), devices=8)
        return list(plan.in_eight_bits)

    weights = ["rows.weight", "columns.weight", "odd.weight"]
    assert sizes("PagedAdamW8bit") == [f"{slot}/{w}" for w in weights for slot in NAMES]
    assert sizes("lion8bit") == [f"exp_avg/{weight}" for weight in weights]
    assert sizes("Adam8bit", min_8bit_size=16384) == [f"{slot}/rows.weight" for slot in NAMES] + [
        f"{slot}/columns.weight" for slot in NAMES
    ]
    with pytest.raises(SpmdZeroConfigError, match=r"optimizer\.params\.min_8bit_size"):
        sizes("Adam8bit", min_8bit_size=-1)
    with pytest.raises(SpmdZeroConfigError, match="adam_w_mode"):
        sizes("AdamW8bit", adam_w_mode=True)
