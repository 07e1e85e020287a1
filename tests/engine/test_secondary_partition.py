"""`zero_hpz_partition_size`: parameters rest as shards of a group's, states as all devices'."""

import collections
from pathlib import Path
from typing import Any

import pytest
import torch

import spmdzero
from spmdzero.backend import arrays, current
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.plan import Role
from tests.engine.test_stage_3 import ALL, WAYS, batches, ledgers_of, model, trained
from tests.support import engines

pytestmark = pytest.mark.backends("any")

GROUP = 4
HPZ = ALL | {"zero_hpz_partition_size": GROUP}
SMALL = {"min_shard_elements": 1}


def started(zero: dict[str, Any], **more: Any) -> spmdzero.Engine:
    return engines.start(model(), zero_optimization=zero, **more)


@pytest.mark.parametrize(
    ("way", "call"),
    [
        ("fp32", "one call"),
        ("bf16, accumulating", "three calls"),
        *(
            pytest.param(way, call, marks=pytest.mark.slow)
            for way, call in [("fp16", "one call"), ("checkpointed", "three calls")]
        ),
    ],
)
def test_it_trains_as_stage_3_does_in_copies_of_the_groups_shards(way: str, call: str) -> None:
    more, how = WAYS[way]
    copies = {"spmd": {"mesh": {"data": 2, "fsdp": GROUP}, "reduction": "explicit"}}
    found = []
    for zero, spmd in ((ALL, {}), (ALL, copies), (HPZ, {})):
        engine = engines.start(model(**how), zero_optimization=zero, **more, **spmd)
        found.append(trained(engine, call, steps=4)[0])
    plain, grouped, ours = found
    if current().name == "jax":
        # Sums go through a group first, in the order of a mesh of copies.
        assert ours == grouped
    assert ours == pytest.approx(plain, rel=2e-6 if way in ("fp32", "checkpointed") else 2e-3)


def test_a_device_holds_a_part_of_its_groups_parameters_and_of_all_devices_states() -> None:
    engine = started(HPZ, bf16={"enabled": True}, gradient_accumulation_steps=2, spmd=SMALL)
    engines.three_calls(engine, *batches(2))
    for name, tensor in engine.named_tensors().items():
        role, _, own = name.partition("/")
        if role in ("parameter", "master", "accumulator", "exp_avg", "exp_avg_sq"):
            parts = {shard.numel() for shard in arrays.local_shards(tensor)}
            split = GROUP if role == "parameter" else 8
            assert parts == {engine.module.get_parameter(own).numel() // split}, name
    planned, held = engine.plan.memory(), spmdzero.measure(engine)
    for role in (Role.PARAMETER, Role.ACCUMULATOR, Role.MASTER, Role.MOMENT):
        assert held[role] == planned[role] > 0


def test_each_use_gathers_within_a_group_and_the_step_ends_with_gathers_between_groups() -> None:
    engine = started(HPZ)
    ledger = ledgers_of(engine).boundary
    weights = {n for n, p in engine.module.named_parameters() if arrays.is_split(p)}
    within, between = collections.Counter(), collections.Counter()
    for gather in ledger.of_role("parameter"):
        assert gather.kind == "all-gather"
        (within if gather.group_size == GROUP else between)[gather.tensor] += 1
        assert gather.group_size in (GROUP, 8 // GROUP)
    assert within == dict.fromkeys(weights, 2) | {"embed.weight": 3}
    assert between == dict.fromkeys(weights, 1)


@pytest.mark.parametrize(("saved", "loaded"), [(HPZ, HPZ), (HPZ, ALL), (ALL, HPZ)])
def test_a_checkpoint_resumes_with_and_without(
    tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any]
) -> None:
    first, second = batches(2)
    engine = started(saved)
    engines.one_call(engine, first)
    engine.save_checkpoint(str(tmp_path))
    resumed = started(loaded)
    resumed.load_checkpoint(str(tmp_path))
    theirs = engine.named_tensors()
    for name, tensor in resumed.named_tensors().items():
        assert torch.equal(tensor.detach().cpu(), theirs[name].detach().cpu()), name
    expected = engines.one_call(engine, second).item()
    assert engines.one_call(resumed, second).item() == pytest.approx(expected, rel=2e-6)


def test_zero_init_places_a_groups_shards_and_the_engine_takes_them_over() -> None:
    config = engines.config(zero_optimization=HPZ)
    with spmdzero.zero.Init(config_dict_or_path=config):
        inside = model()
    split = [p for p in inside.parameters() if arrays.is_mine(p)]
    assert {p.numel() // arrays.local_shards(p)[0].numel() for p in split} == {GROUP}
    engine, *_ = spmdzero.initialize(model=inside, config=config)
    (batch,) = batches(1)
    expected = engines.one_call(started(HPZ), batch).item()
    assert engines.one_call(engine, batch).item() == expected


def test_it_asks_for_nothing_where_the_group_is_all_devices_or_below_stage_3() -> None:
    for zero in ({**HPZ, "zero_hpz_partition_size": 8}, {**HPZ, "zero_hpz_partition_size": 64}):
        assert started(zero).plan.mesh == started(ALL).plan.mesh
    assert started({**HPZ, "stage": 2}).plan.mesh == started(ALL).plan.mesh


@pytest.mark.parametrize(
    ("size", "mesh", "reason"),
    [
        (3, {"fsdp": -1}, "3 doesn't divide the 8 devices"),
        (4, {"data": 4, "fsdp": 2}, "the mesh has groups of 2"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(size: int, mesh: dict[str, int], reason: str) -> None:
    with pytest.raises(SpmdZeroConfigError) as caught:
        started({**HPZ, "zero_hpz_partition_size": size}, spmd={"mesh": mesh})
    assert caught.value.key == "zero_optimization.zero_hpz_partition_size"
    assert reason in str(caught.value)
