"""The same training on 1, 2, 4 and 8 hosts: losses, weights, random numbers."""

from typing import Any

import pytest

from tests.hosts.cases import CASES, STEPS
from tests.hosts.hosts import run_hosts, told

DEVICES = 8
# Stages 2 and 3, the drawing of random numbers, both styles; the rest takes long.
QUICK = ("three calls", "two axes", "loader, stage 3")
# Sums in another order, in fp32, over 50 steps.
NEAR = 1e-6
# fp16's gradients are added up in fp16, 11 bits, by the collectives of a process in another order
# than by those between processes: 3e-5 after 50 steps.
NEAR_IN_FP16 = 1e-4
Results = list[dict[str, Any]]
_known: dict[tuple[int, tuple[str, ...]], Results] = {}


def trained(hosts: int, names: tuple[str, ...]) -> Results:
    """What each of the hosts says of these cases."""
    key = (hosts, names)
    if key not in _known:
        cases = {name: CASES[name] for name in names}
        _known[key] = run_hosts(
            "tests.hosts.training", told(cases), count=hosts, devices=DEVICES // hosts, timeout=1200
        )
    return _known[key]


def assert_one_training(hosts: int, names: tuple[str, ...], name: str) -> None:
    (alone,) = trained(1, names)
    first, *others = trained(hosts, names)
    assert len(others) == hosts - 1
    if name == "three calls":
        # The host that looks records this step, which exchanges the same.
        assert first[name]["repeated"] >= STEPS - 4
        assert all(o[name]["repeated"] == first[name]["repeated"] + 1 for o in others)
    assert all(other[name] | {"repeated": 0} == first[name] | {"repeated": 0} for other in others)
    assert first[name]["world"] == DEVICES
    near = NEAR_IN_FP16 if name == "fp16" else NEAR
    assert first[name]["losses"] == pytest.approx(alone[name]["losses"], abs=near, rel=0)
    # Each is of thousands of elements, as are the sums of weights.
    norms = [seen.get("norms", []) for seen in (first[name], alone[name])]
    assert norms[0] == pytest.approx(norms[1], rel=100 * near)
    assert first[name]["weights"] == pytest.approx(alone[name]["weights"], abs=100 * near, rel=0)
    assert len(set(first[name]["losses"])) > 8
    assert first[name].get("on_host") == alone[name].get("on_host")


@pytest.mark.parametrize("name", QUICK)
def test_two_hosts_train_as_one(name: str) -> None:
    assert_one_training(2, QUICK, name)


def test_only_sums_of_shards_cross_hosts_where_an_axis_is_theirs() -> None:
    """Two hosts, each of which is one place of `data`: its four devices are `fsdp`."""
    moved: dict[str, set[tuple[int, int]]] = {"gradient": set(), "parameter": set()}
    for role, _, size, wire, between in trained(2, QUICK)[0]["two axes"]["moved"]:
        if role in moved:
            moved[role].add((size, between // wire))
    # Each of a host's devices sums its shard with one of the other host; what stays whole goes
    # in one ring over all.
    assert moved == {"gradient": {(4, 0), (2, 4), (8, 1)}, "parameter": {(4, 0)}}


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_hosts_train_as_one(name: str, hosts: int) -> None:
    assert_one_training(hosts, tuple(CASES), name)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["train_batch", "three calls"])
@pytest.mark.parametrize("stage", ["2", "3"])
def test_pairs_of_devices_share_a_replica_on_each_host(stage: str, style: str) -> None:
    (alone,) = run_hosts("tests.hosts.sharing", stage, style, count=1, devices=DEVICES)
    both = run_hosts("tests.hosts.sharing", stage, style, count=2, devices=DEVICES // 2)
    assert both[0] == both[1]
    assert both[0] == pytest.approx(alone, abs=NEAR, rel=0)
    assert len(set(alone)) == 5
