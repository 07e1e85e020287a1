"""The time of copies between a device and its host, read from text that libtpu 0.0.21 wrote.

`v5e_host_memory.txt` is that of test_host_memory.py: three vectors of 16 MiB go each way, and most
of them while a copy goes the other way.
"""

import dataclasses
from pathlib import Path

import pytest

from spmdzero.explain import CHIPS, StepTime, step_time
from spmdzero.hlo import read_schedule

pytestmark = pytest.mark.backends("any")

TEXT = (Path(__file__).parents[1] / "data/hlo/v5e_host_memory.txt").read_text()
VECTOR = 16 * 2**20
V5E = CHIPS["v5e"]
ONE = VECTOR / 16e9
"""Seconds for a vector."""


def time_of(text: str, *, runs: int = 1) -> StepTime:
    return step_time([(text, runs)], V5E, target="v5e:2x4")


def test_each_copy_between_the_memories_counts_once_and_one_within_the_devices_not() -> None:
    copies = [o for o in read_schedule(TEXT) if o.from_host or o.to_host]
    assert [(o.name, o.from_host, o.to_host) for o in copies] == [
        ("copy-start.3", 0, VECTOR), ("copy-start.1", 0, VECTOR), ("copy-start", VECTOR, 0),
        ("copy-start.4", VECTOR, 0), ("copy-start.2", VECTOR, 0), ("copy-start.5", 0, VECTOR),
    ]  # fmt: skip
    assert all(copy.asynchronous for copy in copies)
    time = time_of(TEXT, runs=2)
    assert (time.from_host, time.to_host) == (2 * 3 * VECTOR, 2 * 3 * VECTOR)
    assert (time.wire, time.exposed) == (0, 0)


def test_each_way_is_a_link_of_its_own_and_nothing_else_hides_what_no_operation_does() -> None:
    time = time_of(TEXT)
    assert time.host == pytest.approx(6 * ONE)
    # The first comes in while the first goes out, and the second comes back once it is out.
    assert time.host_exposed == pytest.approx(4 * ONE)
    assert time.seconds == pytest.approx(4 * ONE)
    (host,) = [kind for kind in time.kinds if kind.seconds]
    assert host.name == "host"
    assert host.seconds == pytest.approx(4 * ONE)
    assert "copies" not in {o.kind for o in time.dearest if o.seconds}


def started_beside(cycles: int) -> str:
    """A copy to the host beside an operation of so many cycles, and then one that nothing hides."""
    vector, there = "f32[4194304]{0:T(1024)}", "f32[4194304]{0:T(1024)S(5)}"
    return f"""HloModule m, is_scheduled=true

ENTRY %e (x: {vector}, y: {there}) -> ({there}, {vector}) {{
  %x = {vector} parameter(0)
  %y = {there} parameter(1)
  %copy-start = ({there}, {vector}, u32[]{{:S(2)}}) copy-start(%x)
  %sine = {vector} sine(%x), backend_config={{"estimated_cycles":"{cycles}"}}
  %copy-done = {there} copy-done(%copy-start)
  %copy = {vector} copy(%y)
  %sum = {vector} add(%copy, %sine), backend_config={{"estimated_cycles":"{cycles}"}}
  ROOT %tuple = ({there}, {vector}) tuple(%copy-done, %sum)
}}
"""


def test_a_slice_of_a_stack_in_host_memory_is_a_copy_as_long_as_the_slice() -> None:
    stack, slice_, number = "f32[32,4194304]", "f32[1,4194304]", "s32[]{:T(128)}"
    there = f"{stack}{{1,0:T(8,128)S(5)}}"
    said = f"({there}, {number}, {number}), {slice_}{{1,0:T(8,128)}}, u32[]{{:S(2)}}"
    ways = f"({there}, {slice_}{{1,0:T(8,128)}}, {number}, {number}), {there}, u32[]{{:S(2)}}"
    text = f"""HloModule m, is_scheduled=true

ENTRY %e (x: {there}, i: {number}) -> {there} {{
  %x = {there} parameter(0)
  %i = {number} parameter(1)
  %read-start = ({said}) dynamic-slice-start(%x, %i, %i), dynamic_slice_sizes={{1,4194304}}
  %read-done = {slice_}{{1,0:T(8,128)}} dynamic-slice-done(%read-start)
  %write-start = ({ways}) dynamic-update-slice-start(%x, %read-done, %i, %i)
  ROOT %write-done = {there} dynamic-update-slice-done(%write-start)
}}
"""
    moved = [(o.name, o.from_host, o.to_host) for o in read_schedule(text)]
    assert [each for each in moved if any(each[1:])] == [
        ("read-start", VECTOR, 0), ("write-start", 0, VECTOR)
    ]  # fmt: skip
    time = time_of(text)
    assert (time.host, time.host_exposed) == (pytest.approx(2 * ONE), pytest.approx(2 * ONE))
    assert time_of(text.replace("S(5)", "")).host == 0


@pytest.mark.parametrize(("share", "waits"), [(0.25, 1.75), (1, 1), (4, 1)])
def test_what_runs_between_start_and_end_hides_a_copy(share: float, waits: float) -> None:
    time = time_of(started_beside(round(share * ONE * V5E.clock)))
    assert time.compiled == pytest.approx(2 * share * ONE, rel=1e-6)
    assert time.host == pytest.approx(2 * ONE)
    assert time.host_exposed == pytest.approx(waits * ONE, rel=1e-6)
    assert time.seconds == pytest.approx((2 * share + waits) * ONE, rel=1e-6)


def test_the_rate_is_that_of_the_chip_and_is_said() -> None:
    assert {name: chip.host_rate for name, chip in CHIPS.items()} == {
        "v4": 16e9, "v5e": 16e9, "v5p": 16e9, "v6e": 32e9, "tpu7x": 16e9,
    }  # fmt: skip
    twice = dataclasses.replace(V5E, host_rate=2 * V5E.host_rate)
    fast = step_time([(TEXT, 1)], twice, target="v5e:2x4")
    assert fast.host_exposed == pytest.approx(2 * ONE)
    assert "48.0 MiB from it and 48.0 MiB to it at 32 GB/s each way" in str(fast)
    assert "host (modelled)" in str(fast)
    without = TEXT.replace("S(5)", "")
    assert "host" not in str(time_of(without))
    assert time_of(without).host == 0
