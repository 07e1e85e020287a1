"""What a forward writes into buffers and parameters on two hosts is what it writes on one."""

from typing import Any

import pytest
import torch

from tests.hosts.hosts import run_hosts, told

pytestmark = pytest.mark.slow
DEVICES = 8
CASES: dict[str, dict[str, Any]] = {
    "captured": {},
    "three calls": {"style": "three calls", "config": {"zero_optimization": {"stage": 1}}},
    "bf16": {"config": {"bf16": {"enabled": True}}},
    "global": {"config": {"spmd": {"forward": "global"}}},
    "differs": {"differs": True},
}
# Sums in another order over 6 steps: in fp32, and in bf16 of 8 bits.
NEAR = {"bf16": {"rtol": 2e-2, "atol": 2e-2}}
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found() -> dict[int, Results]:
    """By the number of hosts, what each of them says of all cases."""
    return {
        count: run_hosts(
            "tests.hosts.writing", told(CASES), count=count, devices=DEVICES // count, timeout=1200
        )
        for count in (1, 2)
    }


@pytest.mark.parametrize("name", [name for name in CASES if name != "differs"])
def test_two_hosts_write_what_one_writes(found: dict[int, Results], name: str) -> None:
    (alone,), (first, second) = ([host[name] for host in found[count]] for count in (1, 2))
    assert first == second
    assert [alone["hosts"], first["hosts"]] == [1, 2]
    near = NEAR.get(name, {"rtol": 1e-5, "atol": 1e-6})
    torch.testing.assert_close(first["losses"], alone["losses"], **near)
    assert first["written"].keys() == alone["written"].keys()
    for key, value in alone["written"].items():
        mine, theirs = torch.tensor(first["written"][key]), torch.tensor(value)
        torch.testing.assert_close(mine, theirs, **near, msg=lambda text, key=key: f"{key}: {text}")
        # Each was written.
        assert theirs.any(), key


def test_an_integer_that_hosts_write_differently_is_refused_on_each(
    found: dict[int, Results],
) -> None:
    for hosts in found.values():
        for host in hosts:
            assert "differs" in host["differs"]["error"]
