"""The engine's config getters return what real DeepSpeed's return for the same JSON."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import spmdzero
from tests.surface.record_getters import CONFIGS, plain

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "engine_getters.json").read_text())
# One rank was recorded, and this process has 8 devices.
WORLD_DEPENDENT = {"train_batch_size": 8}


@pytest.fixture(scope="module")
def engines() -> dict[str, spmdzero.Engine]:
    return {
        name: spmdzero.initialize(model=torch.nn.Linear(8, 8), config=config)[0]
        for name, config in CONFIGS.items()
    }


@pytest.mark.parametrize("config", CONFIGS)
def test_every_recorded_getter_returns_deepspeeds_value(
    engines: dict[str, spmdzero.Engine], config: str
) -> None:
    def value(name: str) -> Any:
        found = getattr(engines[config], name)
        return plain(found() if callable(found) else found)

    expected = {
        name: recorded * WORLD_DEPENDENT.get(name, 1) if name in WORLD_DEPENDENT else recorded
        for name, recorded in RECORDED[config].items()
    }
    assert {name: value(name) for name in expected} == expected


def test_the_recording_holds_more_than_a_hundred_getters_and_tells_the_configs_apart() -> None:
    differing = {
        name
        for name, value in RECORDED["defaults"].items()
        if value != RECORDED["everything"][name]
    }
    assert len(RECORDED["defaults"]) > 100
    assert len(differing) > 30


def test_every_getter_says_what_it_returns() -> None:
    for name in (name for name in RECORDED["defaults"] if hasattr(spmdzero.Engine, name)):
        getter = inspect.getattr_static(spmdzero.Engine, name)
        if inspect.isfunction(getter):
            assert getter.__doc__
            assert getter.__name__ == name
            assert inspect.signature(getter).return_annotation is not inspect.Signature.empty
    assert spmdzero.Engine.zero_reduce_scatter.__doc__ == (
        "The config's ``zero_optimization.reduce_scatter``."
    )


def test_batch_info_is_three_numbers(engines: dict[str, spmdzero.Engine]) -> None:
    assert engines["everything"].get_batch_info() == (4 * 3 * 8, 4, 3)


def test_an_optimizer_passed_in_gives_its_class_name() -> None:
    model = torch.nn.Linear(8, 8)
    engine, *_ = spmdzero.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train_micro_batch_size_per_gpu": 2},
    )
    assert engine.optimizer_name() == "SGD"
    assert engine.optimizer_params() is None


def test_checkpoint_getters_tell_what_the_config_says() -> None:
    engine, *_ = spmdzero.initialize(
        model=torch.nn.Linear(8, 8),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "checkpoint": {"tag_validation": "Fail", "use_node_local_storage": True},
            "compile": {"deepcompile": True},
        },
    )
    assert engine.checkpoint_tag_validation_enabled()
    assert engine.checkpoint_tag_validation_fail()
    assert engine.use_node_local_storage()
    assert (engine.is_deepcompile_enabled(), engine.is_deepcompile_active()) == (True, False)


def test_devices_are_data_parallel_ranks_and_processes_are_the_world(
    engines: dict[str, spmdzero.Engine],
) -> None:
    engine = engines["defaults"]
    assert engine.dp_world_size == 8
    assert (engine.world_size, engine.global_rank, engine.get_data_parallel_rank()) == (1, 0, 0)


def test_compiling_is_logged_once_and_changes_nothing(
    engines: dict[str, spmdzero.Engine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="spmdzero"):
        engines["defaults"].compile()
        engines["defaults"].compile(backend="openxla")
    assert [r.message for r in caplog.records if "XLA compiles every step" in r.message] == [
        "engine.compile() has no effect of its own: XLA compiles every step"
    ]
