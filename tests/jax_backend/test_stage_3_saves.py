"""Saves at stage 3: one tensor at a time leaves the devices, and a kill loses nothing."""

import functools
import random
import secrets
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.backend import arrays
from spmdzero.formats import Retention, SaveOrder, latest_tag, save_native
from spmdzero.formats._state import in_memory
from spmdzero.state import _live_state
from tests.checkpoint.files import interrupted, killed_at
from tests.checkpoint.runs import assert_state, config, start, train, whole_state

KILLS, MORE_KILLS = 6, 40


class _Counted:
    """The backend's arrays, which notes how many bytes of shards a host holds at once."""

    def __init__(self) -> None:
        self.most = 0
        self._alive: list[weakref.ref[torch.Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(arrays, name)

    def local_shards(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        shards = arrays.local_shards(tensor)
        self._alive += map(weakref.ref, shards)
        held = [shard for ref in self._alive if (shard := ref()) is not None]
        self.most = max(self.most, sum(shard.nbytes for shard in held))
        return shards


def engine_after(steps: int) -> spmdzero.Engine:
    engine = start(config(3))
    train(engine, range(steps))
    return engine


@pytest.mark.parametrize("how", ["native", "for DeepSpeed", "16-bit model"])
def test_a_save_has_the_parts_of_one_tensor_on_the_host_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    engine = engine_after(1)
    largest = max(tensor.nbytes for tensor in whole_state(engine).values())
    counted = _Counted()
    monkeypatch.setattr(_live_state, "arrays", counted)
    saves: dict[str, Callable[[], Any]] = {
        "native": lambda: engine.save_checkpoint(tmp_path),
        "for DeepSpeed": lambda: engine.save_deepspeed_checkpoint(tmp_path, universal=False),
        "16-bit model": lambda: engine.save_16bit_model(tmp_path),
    }
    saves[how]()
    assert 0 < counted.most <= largest


def order_of(folder: Path, step: int) -> SaveOrder:
    return SaveOrder(
        folder=folder,
        tag=f"global_step{step}",
        nonce=secrets.token_hex(4),
        latest=True,
        retention=Retention(last=1),
        description={"counters": {"global_steps": step}},
    )


def check_kills(folder: Path, kills: int, *, seed: int) -> None:
    """Kills the save of a third step, seeded; what is loaded then is one of the two, whole."""
    engine = engine_after(2)
    engine.save_checkpoint(folder / "before")
    states = {2: whole_state(engine)}
    train(engine, range(2, 3))
    states[3] = whole_state(engine)
    third = in_memory(_live_state.live_state(engine._training, client_state={}))
    resumed = start(config(3))

    def save(where: Path) -> None:
        save_native(third, order_of(where, 3))

    points: list[str] = []
    shutil.copytree(folder / "before", folder / "counted")
    with interrupted(lambda _, name: points.append(name)):
        save(folder / "counted")
    draw = random.Random(seed)
    for number in range(kills):
        where = folder / str(number)
        shutil.copytree(folder / "before", where)
        torn = draw.choice([None, draw.random()])
        assert killed_at(draw.randrange(len(points)), functools.partial(save, where), torn=torn)
        assert latest_tag(where) in ("global_step2", "global_step3")
        resumed.load_checkpoint(where)
        assert_state(resumed, states[resumed.global_steps])
        # The next save needs no help, and removes what the killed one left.
        save(where)
        resumed.load_checkpoint(where)
        assert_state(resumed, states[3])
        shutil.rmtree(where)


def test_a_save_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, KILLS, seed=3)


@pytest.mark.slow
def test_forty_kills_in_a_save_lose_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, MORE_KILLS, seed=4)
