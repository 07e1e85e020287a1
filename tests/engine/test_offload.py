"""`offload_optimizer` and `offload_param`: the numbers of states on the devices, and one line."""

import logging
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.backend import current
from tests.support import engines
from tests.support.contract import make_batch, make_model

CPU = {"device": "cpu", "pin_memory": True}
STAGES = (1, 2, 3) if current().name == "jax" else (1, 2)
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
BOTH = {"offload_optimizer": CPU, "offload_param": CPU}


def started(stage: int, precision: str = "fp32", **zero: Any) -> spmdzero.Engine:
    zero |= {"stage": stage, "stage3_param_persistence_threshold": 0}
    return engines.start(make_model(), zero_optimization=zero, **PRECISIONS[precision])


def trained(stage: int, precision: str, **zero: Any) -> dict[str, torch.Tensor]:
    engine = started(stage, precision, **zero)
    losses = [engines.one_call(engine, make_batch(step, 0)).detach() for step in range(3)]
    states = {name: tensor.detach().cpu() for name, tensor in engine.named_tensors().items()}
    return states | {"losses": torch.stack([loss.cpu() for loss in losses])}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_offloaded_trains_bit_for_bit_as_what_is_not(stage: int, precision: str) -> None:
    plain, offloaded = trained(stage, precision), trained(stage, precision, **BOTH)
    assert plain.keys() == offloaded.keys()
    assert [name for name in plain if not torch.equal(plain[name], offloaded[name])] == []
    assert plain["losses"][0] != plain["losses"][-1]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.message.startswith("offload_")]


def test_one_line_says_where_states_rest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "spmdzero"):
        for _ in range(2):
            engine = started(2, "bf16", **BOTH)
    assert [line.partition(":")[0] for line in lines(caplog)] == [
        "offload_optimizer",
        "offload_param has no effect below stage 3, as in DeepSpeed",
    ]
    assert engine.zero_cpu_offload()
    assert engine.zero_use_cpu_optimizer()
    assert engine.zero_offload_param().pin_memory
    assert not engines.start(make_model()).zero_cpu_offload()
