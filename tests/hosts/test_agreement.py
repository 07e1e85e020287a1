"""Hosts that don't have the same are told so at the start, all of them the same."""

import re
from typing import Any

import pytest

from tests.hosts.hosts import run_hosts

DIFFERENCES = {
    "config": r"config, versions and devices: optimizer\.params\.lr: 0\.01 on host 0 .+, 1\.01 on",
    "versions": r"config, versions and devices: jaxlib: [\d.]+ on host 0 .+, 0\.0\.1 on host 1 "
    r".+\. Start every host with the same config, on the same packages",
    "structure": r"the model's structure: last\.bias: \[24\] float32 trained on host 0 .+, "
    r"\[24\] float32 on host 1 .+; extra\.weight: nothing on host 0 .+, \[3, 3\]",
    "values": r"values: wide\.weight, wide\.bias, odd\.weight and 2 more differ between "
    r"host 0 \([^)]+\) and host 1 \([^)]+\)\. Set the same seed .+broadcast",
    "buffers": r"the model's values: 1\.running_mean differs between host 0",
    "first_batch": r"the first batch: input 'x': \[4, 24\] float32 on host 0 .+, \[3, 24\]",
    "weights": r"the model's values: wide\.weight, ",
}  # fmt: skip


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    return run_hosts("tests.hosts.differing", count=2, devices=2)


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_every_host_raises_one_error_that_names_the_difference(
    both: list[dict[str, Any]], kind: str
) -> None:
    first, second = (host[kind] for host in both)
    assert first == second
    name, message = first
    assert name == "HostsDifferError"
    assert re.search(DIFFERENCES[kind], message), message


def test_other_device_counts_are_a_difference() -> None:
    first, second = run_hosts("tests.hosts.differing", "devices", count=2, devices=1)
    assert first == second
    assert "devices: 2 x CPU on host 0" in first["devices"][1]
    assert "3 x CPU on host 1" in first["devices"][1]


def test_the_first_hosts_values_are_those_of_all_where_the_config_says_so(
    both: list[dict[str, Any]],
) -> None:
    assert both[0]["broadcast"] == both[1]["broadcast"] == both[0]["same"] == both[1]["same"]
