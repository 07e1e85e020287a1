"""Adafactor, transformers' and torch's, on shards, beside the classes themselves."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor

import spmdzero
from spmdzero.backend import arrays
from spmdzero.errors import SpmdZeroConfigError, SpmdZeroUsageError
from spmdzero.formats import Conversion, convert
from spmdzero.inspect import measure
from spmdzero.plan import Role
from tests.engine.test_eight_bit_states import Net, assert_same, batch, state, train
from tests.support import engines

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

STEPS = 6
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    # As Trainer makes it for optim="adafactor".
    "trainer": lambda p: Adafactor(p, lr=1e-2, scale_parameter=False, relative_step=False),
    "default": Adafactor,
    "all": lambda p: Adafactor(
        p, warmup_init=True, beta1=0.9, weight_decay=0.1, clip_threshold=0.5, eps=(1e-20, 1e-2)
    ),
    "torch": lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    "torch's own": lambda p: torch.optim.Adafactor(p, d=2.0, eps=(1e-6, 1e-2), beta2_decay=-0.7),
}


def start(make: Make, *, stage: int = 2, **more: Any) -> spmdzero.Engine:
    config = engines.config(
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        zero_allow_untested_optimizer=True,
        gradient_clipping=0.0,
        **more,
    )
    model = Net()
    return spmdzero.initialize(model=model, optimizer=make(model.parameters()), config=config)[0]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_those_of_the_class(name: str, stage: int) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    wanted = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    engine = start(OPTIMIZERS[name], stage=stage)
    found = train(engine, 0, STEPS // 2)
    found += [engines.one_call(engine, batch(step)).item() for step in range(STEPS // 2, STEPS)]
    # Sums of fp32 in another order, six updates of up to 1 % of a weight apart; found are 8e-6.
    assert found == pytest.approx(wanted, rel=3e-5)
    assert measure(engine)[Role.MOMENT] == engine.plan.memory()[Role.MOMENT]


def test_rows_and_columns_are_small_and_whole() -> None:
    engine = start(Adafactor)
    train(engine, 0, 1)
    tensors = engine.named_tensors()
    row, column = tensors["exp_avg_sq_row/rows.weight"], tensors["exp_avg_sq_col/rows.weight"]
    assert (tuple(row.shape), tuple(column.shape)) == ((64,), (256,))
    assert set(arrays.local_shapes(column)) == {(256,)}
    assert "exp_avg_sq/rows.weight" not in tensors
    # What is no matrix has a mean for each element.
    assert tuple(tensors["exp_avg_sq/rows.bias"].shape) == (64,)
    matrices = ((64, 256), (300, 64), (17, 300), (1, 17))
    elements = sum(rows + columns for rows, columns in matrices) + 64 + 1
    assert engine.plan.memory()[Role.MOMENT] == 4 * elements


def test_no_large_tensor_is_gathered_for_rows_and_columns() -> None:
    engine = start(OPTIMIZERS["trainer"])
    with spmdzero.record_ledgers(engine) as ledgers:
        train(engine, 0, 1)
    extra = [c for c in ledgers.boundary.collectives if c.role not in ("gradient", "parameter")]
    # The one weight that no dim divides is gathered, to have rows; others send a row or a column.
    large = [c.bytes for c in extra if c.bytes > 4 * 300]
    assert all(size <= 4 * 17 * 300 + 32 for size in large), extra
    assert len(large) <= 2


def test_a_checkpoint_and_a_state_dict_go_on_exactly(tmp_path: Path) -> None:
    first = start(OPTIMIZERS["all"])
    train(first, 0, 3)
    first.save_checkpoint(tmp_path)
    states = first.optimizer.state_dict()
    assert tuple(states["state"][0]["exp_avg_sq_row"].shape) == (64,)
    loaded, given = start(OPTIMIZERS["all"]), start(OPTIMIZERS["all"], stage=3)
    loaded.load_checkpoint(tmp_path)
    assert_same(state(loaded), state(first))
    given.load_checkpoint(tmp_path, load_optimizer_states=False)
    given.optimizer.load_state_dict(states)
    wanted = train(first, 3, 6)
    assert train(loaded, 3, 6) == wanted
    assert train(given, 3, 6) == pytest.approx(wanted, rel=1e-6)


def test_the_configs_adafactor_is_torchs() -> None:
    config = {"type": "Adafactor", "params": {"lr": 0.1, "weight_decay": 0.1}}
    by_name = engines.start(
        Net(), optimizer=config, zero_allow_untested_optimizer=True, gradient_clipping=0.0
    )
    assert train(by_name, 0, 3) == train(start(OPTIMIZERS["torch"]), 0, 3)


def test_groups_that_differ_in_what_is_compiled_are_refused() -> None:
    model = Net()
    groups = [
        {"params": list(model.rows.parameters()), "beta1": 0.9},
        {"params": list(model.columns.parameters())},
    ]
    config = engines.config(zero_allow_untested_optimizer=True)
    with pytest.raises(SpmdZeroConfigError, match=r"optimizer\.params\.beta1 = None"):
        spmdzero.initialize(model=model, optimizer=Adafactor(groups), config=config)


@pytest.mark.parametrize("to", ["universal", "deepspeed"])
def test_deepspeeds_files_have_no_rows_and_say_so(to: Any, tmp_path: Path) -> None:
    engine = start(Adafactor)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(SpmdZeroUsageError, match="Adafactor's rows and columns haven't"):
        convert(tmp_path, tmp_path / "out", Conversion(to=to, ranks=2))


def test_a_rate_that_it_finds_itself_is_shown_as_0(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "spmdzero"):
        engine = start(Adafactor, steps_per_print=1)
        train(engine, 0, 2)
    assert engine.get_lr() == [0.0]
    assert "Adafactor's relative_step finds its own learning rate" in caplog.text
