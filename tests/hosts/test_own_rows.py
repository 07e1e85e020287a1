"""A loss and metrics that a script computes outside of the model, of its own host's rows."""

from typing import Any

import pytest

from tests.hosts.hosts import run_hosts, told
from tests.hosts.test_training import NEAR
from tests.support.bounds import summed


def _case(way: str = "train", stage: int = 2, **case: Any) -> dict[str, Any]:
    config = {"zero_optimization": {"stage": stage}, **case.pop("config", {})}
    return {"way": way, "steps": 8, "config": config, **case}


QUICK = {
    "dict": _case(container="dict", sent=True),
    "evaluation": _case("evaluate", steps=2),
    "uneven evaluation": _case("alone"),
    "refusals": _case("refuse"),
}
ALL = {
    "stage 0": _case(stage=0),
    "stage 1": _case(stage=1),
    "stage 2": _case(),
    "dataclass": _case(container="dataclass"),
    "moved before": _case(moved=True, container="dict"),
    "plain backward": _case(plain=True, container="dict"),
    "penalty": _case(penalty=True, container="dict"),
    "accumulation, stage 1": _case(stage=1, config={"gradient_accumulation_steps": 2}),
    "accumulation, stage 2": _case(penalty=True, config={"gradient_accumulation_steps": 2}),
    "bf16": _case(container="dict", config={"bf16": {"enabled": True}}),
    "fp16": _case(config={"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "explicit": _case(config={"spmd": {"reduction": "explicit"}}),
    "two axes": _case(config={"spmd": {"mesh": {"data": 2, "fsdp": 4}}}),
    "traced": _case(penalty=True, config={"spmd": {"capture": False}}),
    "loader": _case("load"),
    "no batches": _case("scaled"),
    "without the engine": _case("direct"),
    **QUICK,
}  # fmt: skip
_known: dict[tuple[int, int, bool], list[dict[str, Any]]] = {}


def ran(hosts: int, devices: int, *, quick: bool) -> list[dict[str, Any]]:
    """What each of the hosts sees."""
    key = (hosts, devices, quick)
    if key not in _known:
        _known[key] = run_hosts(
            "tests.hosts.own_rows",
            told(QUICK if quick else ALL),
            count=hosts,
            devices=devices // hosts,
            timeout=1200,
        )
    return _known[key]


def assert_as_alone(name: str, hosts: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """The hosts' losses are their own, and their mean is that of all rows on one host."""
    mine = [host[name]["losses"] for host in hosts]
    assert len({tuple(losses) for losses in mine}) == len(hosts)
    means = [sum(losses) / len(losses) for losses in zip(*mine, strict=True)]
    # fp16's gradients are added up in fp16, by several hosts in another order.
    near = 1e-4 if name == "fp16" else NEAR
    assert means == pytest.approx(alone[name]["losses"], abs=near, rel=0)
    if "weights" not in alone[name]:
        return
    first, *others = (host[name]["weights"] for host in hosts)
    assert all(other == first for other in others)
    # These are sums of hundreds of elements.
    assert first == pytest.approx(alone[name]["weights"], abs=100 * near, rel=0)


def assert_evaluated(hosts: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Each host counts its own rows, and together they count those of all."""
    found = [host["evaluation"] for host in hosts]
    (whole,) = (alone["evaluation"],)
    for count in ("right", "seen"):
        assert sum(host[count] for host in found) == whole[count]
    assert all(host["seen"] * len(hosts) == whole["seen"] for host in found)
    assert sum(host["loss"] for host in found) == summed(whole["loss"])
    assert found[0]["first"] == whole["first"] != found[1]["first"]
    assert all(host["by comm"] == whole["right"] for host in found)
    assert all(host["text"] == str(host["right"]) for host in found)


def assert_evaluated_unevenly(hosts: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Hosts of other numbers of batches, of other numbers of rows, wait for none."""
    found = [host["uneven evaluation"] for host in hosts]
    whole = alone["uneven evaluation"]
    sums = [value for host in found for value in host["sums"]]
    assert sums == summed(whole["sums"])
    assert len({len(host["sums"]) for host in found}) > 1
    # On TPUs a program of all devices would wait for those of the others.
    assert all(set(host["places"]) <= {rank} for rank, host in enumerate(found))
    assert found[0]["places"]
    assert sum(host["own"] for host in found) == whole["own"]
    assert all(host["total"] == whole["own"] for host in found)


def assert_refused(hosts: list[dict[str, Any]]) -> None:
    """What is another on each host doesn't get into a parameter; a CPU tensor does."""
    for host in hosts:
        said = host["refusals"]["said"]
        assert said.keys() == {"add", "assign", "copy"}
        for text in said.values():
            assert "own_rows.py:" in text
            assert "a value of this host's own" in text
            assert "parameter.data.copy_(value.cpu())" in text
        assert host["refusals"]["written"] == 2 * 19


def assert_folded(name: str, hosts: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """From the fourth step on nothing is compiled, and every forward was folded."""
    for host in (*hosts, alone):
        compiled = host[name]["compiled"]
        assert compiled[3:] == [compiled[3]] * len(compiled[3:])
        assert host[name]["folded"] == len(compiled)


def assert_only_scalars_move(name: str, hosts: list[dict[str, Any]]) -> None:
    """Beside gradients and parameters: a host's rows stay on the devices that have them."""
    others = [c for c in hosts[0][name]["sent"] if c[0] not in ("gradient", "parameter")]
    assert max(size for _, size, _ in others) <= 8
    # The loss's own sums are within a host, its mean over hosts, the norm and `balance` cross.
    assert sum(crossing > 0 for *_, crossing in others) == 3


@pytest.mark.slow
def test_two_hosts_compute_losses_and_metrics_of_their_own_rows() -> None:
    (alone,), both = ran(1, 4, quick=True), ran(2, 4, quick=True)
    assert_as_alone("dict", both, alone)
    assert_folded("dict", both, alone)
    assert_only_scalars_move("dict", both)
    assert_evaluated(both, alone)
    assert_evaluated_unevenly(both, alone)
    assert_as_alone("uneven evaluation", both, alone)
    assert_refused(both)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("evaluation", "refusals")])
def test_hosts_train_on_losses_of_their_own_rows_as_one(name: str, hosts: int) -> None:
    (alone,) = ran(1, 8, quick=False)
    assert_as_alone(name, ran(hosts, 8, quick=False), alone)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_evaluate_their_own_rows(hosts: int) -> None:
    (alone,) = ran(1, 8, quick=False)
    assert_evaluated(ran(hosts, 8, quick=False), alone)
    assert_evaluated_unevenly(ran(hosts, 8, quick=False), alone)
