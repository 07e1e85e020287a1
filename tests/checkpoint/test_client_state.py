"""What a caller keeps beside the weights: saved as it is then, read without devices or code."""

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spmdzero
from spmdzero.backend import arrays
from tests.checkpoint.files import interrupted
from tests.checkpoint.runs import config, start, train
from tests.checkpoint.test_resumed_numbers import SEEN
from tests.interchange.record_resumed import CLIENT_STATE

Save = Callable[..., bool]


@pytest.fixture(scope="module")
def engine() -> spmdzero.Engine:
    engine = start(config(2, checkpoint={"async": True}))
    train(engine, range(1))
    return engine


@contextlib.contextmanager
def held(engine: spmdzero.Engine) -> Iterator[None]:
    """The save that begins inside writes nothing before the end."""
    entered, go_on = threading.Event(), threading.Event()

    def hold(count: int, name: str) -> None:
        if threading.current_thread().name.startswith("spmdzero-save"):
            entered.set()
            assert go_on.wait(60)

    with interrupted(hold):
        try:
            yield
            assert entered.wait(60)
        finally:
            go_on.set()
            engine.wait_checkpoint()


@pytest.mark.parametrize("method", ["save_checkpoint", "save_deepspeed_checkpoint"])
def test_a_client_state_comes_back_with_what_deepspeed_takes(
    engine: spmdzero.Engine, tmp_path: Path, method: str
) -> None:
    getattr(engine, method)(tmp_path, client_state=CLIENT_STATE)
    _, found = engine.load_checkpoint(tmp_path)
    assert found is not None
    for key, value in CLIENT_STATE.items():
        assert np.array_equal(found[key], value), key
        # numpy's numbers are Python's, and a default is a function.
        own = type(value.item()) if isinstance(value, np.generic) else type(value)
        assert SEEN["client_state"][key] == type(value).__name__
        assert type(found[key]) is (dict if own is collections.defaultdict else own), key


def test_numbers_of_numpys_in_a_param_group_are_saved_as_numbers(
    engine: spmdzero.Engine, tmp_path: Path
) -> None:
    group = engine.optimizer.param_groups[0]
    group["eps"] = np.float64(1e-7)
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert type(group["eps"]) is float
    assert group["eps"] == 1e-7
    group["eps"] = 1e-8


def test_an_asynchronous_save_holds_the_hosts_state_of_its_call(
    engine: spmdzero.Engine, tmp_path: Path
) -> None:
    mine: dict[str, Any] = {"history": [0.0], "average": torch.zeros(3), "counts": np.zeros(3)}
    mine["weights"] = engine.module.state_dict()
    then = {name: tensor.cpu() for name, tensor in mine["weights"].items()}
    lr = engine.get_lr()
    with held(engine):
        engine.save_checkpoint(tmp_path, client_state=mine)
        mine["history"].append(1.0)
        mine["average"] += 1
        mine["counts"] += 1
        # The devices give the buffers of the weights to others.
        train(engine, range(3, 6))
        engine.config["mine"] = "later"
    del engine.config["mine"]
    assert engine.get_lr() != lr
    _, found = engine.load_checkpoint(tmp_path)
    assert found is not None
    assert engine.get_lr() == lr
    assert found["history"] == [0.0]
    assert not found["average"].any()
    assert not found["counts"].any()
    assert [n for n, tensor in found["weights"].items() if not torch.equal(tensor, then[n])] == []
    assert '"later"' not in next(tmp_path.glob("*/manifest-*")).read_text()


def test_what_can_not_be_saved_is_refused_by_the_call_and_not_by_a_later_one(
    engine: spmdzero.Engine, tmp_path: Path
) -> None:
    class Raises:
        def __reduce__(self) -> Any:
            raise KeyError("not now")

    for value in (lambda: 1, Raises(), torch.Generator(), np.array([object()])):
        with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"client_state\['mine'\]\[0\]"):
            engine.save_checkpoint(tmp_path, client_state={"mine": [value]})
        engine.optimizer.param_groups[0]["mine"] = value
        with pytest.raises(spmdzero.SpmdZeroUsageError, match=r"param_groups\[0\]\['mine'\]"):
            engine.save_checkpoint(tmp_path)
        del engine.optimizer.param_groups[0]["mine"]
    engine.wait_checkpoint()
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_the_devices_is_saved_as_one_of_the_host(
    engine: spmdzero.Engine, tmp_path: Path
) -> None:
    best = next(engine.module.parameters())
    assert arrays.is_mine(best)
    engine.save_checkpoint(tmp_path, client_state={"best": best, "loss": best.sum()})
    engine.wait_checkpoint()
    (file,) = tmp_path.glob("*/state-*.pt")
    # As a process without a device would read it.
    found = torch.load(file, weights_only=True)["client_state"]
    assert type(found["best"]) is torch.nn.Parameter
    assert torch.equal(found["best"], best.cpu())
    assert {tensor.device.type for tensor in found.values()} == {"cpu"}


@pytest.fixture(scope="module")
def plain() -> spmdzero.Engine:
    return start(config(2))


def test_a_large_client_state_is_not_held_twice(plain: spmdzero.Engine, tmp_path: Path) -> None:
    plain.save_checkpoint(tmp_path, tag="first")
    large = torch.ones(32 << 20)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _memory("VmRSS")
    plain.save_checkpoint(tmp_path, client_state={"large": large})
    # A copy would be 128 MB; the rest of the process does what it does meanwhile.
    assert _memory("VmHWM") - before < 64 << 20


def test_a_line_says_that_a_tag_of_another_engine_of_the_process_is_replaced(
    engine: spmdzero.Engine,
    plain: spmdzero.Engine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "spmdzero"):
        engine.save_checkpoint(tmp_path, tag="mine")
        plain.save_checkpoint(tmp_path, tag="other")
        plain.save_checkpoint(tmp_path, tag="other")
        assert "another engine" not in caplog.text
        plain.save_checkpoint(tmp_path, tag="mine")
    engine.wait_checkpoint()
    assert "mine, which another engine of this process has saved, is replaced" in caplog.text


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10
