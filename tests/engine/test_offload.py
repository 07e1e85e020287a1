"""`offload_optimizer` and `offload_param`: the numbers of states on the devices, and one line."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.backend import arrays, current, runtime
from spmdzero.compat.tensor_fragment import safe_set_full_optimizer_state
from spmdzero.inspect import measure
from spmdzero.plan import Role
from tests.support import engines
from tests.support.contract import make_batch, make_model
from tests.support.selected import product_rows

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

CPU = {"device": "cpu", "pin_memory": True}
STAGES = (1, 2, 3)
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
BOTH = {"offload_optimizer": CPU, "offload_param": CPU}


def started(
    stage: int, precision: str = "fp32", *, layers: int = 1, **zero: Any
) -> spmdzero.Engine:
    zero |= {"stage": stage, "stage3_param_persistence_threshold": 0}
    return engines.start(make_model(layers=layers), zero_optimization=zero, **PRECISIONS[precision])


def trained(stage: int, precision: str, **zero: Any) -> dict[str, torch.Tensor]:
    engine = started(stage, precision, **zero)
    losses = [engines.one_call(engine, make_batch(step, 0)).detach() for step in range(3)]
    states = {name: tensor.detach().cpu() for name, tensor in engine.named_tensors().items()}
    return states | {"losses": torch.stack([loss.cpu() for loss in losses])}


@pytest.mark.parametrize(
    ("stage", "precision"), product_rows(STAGES, PRECISIONS, quick={(2, "fp32"), (3, "bf16")})
)
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
            engine = started(2, "bf16", layers=2, **BOTH)
    of_optimizer, of_param = lines(caplog)
    assert of_param == "offload_param has no effect below stage 3, as in DeepSpeed"
    # Master and moments of 107,264 elements in fp32, an eighth of all but the small ones.
    if runtime.host_memory():
        there = "171 KiB a device, rest in host memory (21.0 KiB of small ones on the devices)"
    else:
        name = {"jax": "JAX"}.get(current().name, current().name)
        there = (
            f"192 KiB a device, rest on the devices: {name} has no host memory beside CPU devices. "
            "The numbers are the same"
        )
    assert of_optimizer == f"offload_optimizer: masters and moments, {there}"
    assert engine.zero_cpu_offload()
    assert engine.zero_use_cpu_optimizer()
    assert engine.zero_offload_param().pin_memory
    assert not engines.start(make_model()).zero_cpu_offload()


def on_host(engine: spmdzero.Engine) -> set[str]:
    named = engine.named_tensors()
    there = zip(named, arrays.are_on_host([*named.values()]), strict=True)
    return {name for name, rests in there if rests}


@pytest.mark.parametrize(
    ("call", "stage"),
    product_rows(
        (engines.one_call, engines.three_calls),
        STAGES[1:],
        quick={(engines.one_call, 2), (engines.three_calls, 3)},
    ),
)
def test_states_are_where_the_plan_has_them_after_each_step(call: Any, stage: int) -> None:
    engine = started(stage, "bf16", **BOTH)
    planned = {name for name in engine.named_tensors() if engine.plan.at_rest(name).on_host}
    assert bool(planned) == runtime.host_memory()
    assert (f"parameter/{WEIGHT}" in planned) == (runtime.host_memory() and stage == 3)
    for step in range(5):
        call(engine, make_batch(step, 0))
        assert on_host(engine) == planned
    held, expected = measure(engine), engine.plan.memory()
    assert held.on_host == expected.on_host
    assert {r: held[r] for r in KEPT} == {r: expected[r] for r in KEPT}
    told = next(c.said for c in spmdzero.doctor(engine).checks if c.name == "device memory")
    assert ("in host memory" in told) == runtime.host_memory()


KEPT = (Role.PARAMETER, Role.MASTER, Role.MOMENT)
WEIGHT = "h.0.mlp.c_fc.weight"


def test_what_is_written_into_a_state_goes_back_to_where_it_rests() -> None:
    engine = started(2, "bf16", **BOTH)
    engines.one_call(engine, make_batch(0, 0))
    parameter = engine.module.get_parameter(WEIGHT)
    moment = engine.optimizer.state[parameter]["exp_avg"]
    safe_set_full_optimizer_state(parameter, torch.ones(parameter.shape), "exp_avg")
    assert (f"exp_avg/{WEIGHT}" in on_host(engine)) == runtime.host_memory()
    moment.mul_(2.0)
    assert torch.equal(moment.cpu(), torch.full(tuple(moment.shape), 2.0))
    saved = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(saved)
    assert torch.equal(
        saved["state"][0]["exp_avg"], engine.optimizer.state_dict()["state"][0]["exp_avg"]
    )
    engines.one_call(engine, make_batch(1, 0))
    planned = {name for name in engine.named_tensors() if engine.plan.at_rest(name).on_host}
    assert on_host(engine) == planned


@pytest.mark.parametrize("first", [BOTH, {}], ids=["saved on the host", "loaded to the host"])
def test_a_checkpoint_goes_on_with_and_without_offloading(
    first: dict[str, Any], tmp_path: Path
) -> None:
    engine = started(2, "bf16", **first)
    for step in range(2):
        engines.one_call(engine, make_batch(step, 0))
    engine.save_checkpoint(tmp_path)
    expected = [engines.one_call(engine, make_batch(step, 0)).item() for step in (2, 3)]
    other = started(2, "bf16", **({} if first else BOTH))
    other.load_checkpoint(tmp_path)
    planned = {name for name in other.named_tensors() if other.plan.at_rest(name).on_host}
    assert on_host(other) == planned
    assert [engines.one_call(other, make_batch(s, 0)).item() for s in (2, 3)] == expected
