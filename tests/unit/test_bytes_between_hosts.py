"""What a collective sends from host to host, by the groups that the compiler prints."""

import pytest

from spmdzero import SpmdZeroUsageError
from spmdzero.hlo import between_hosts
from spmdzero.inspect import CollectiveLedger

pytestmark = pytest.mark.backends("any")

# On eight devices; each form names the groups in its own way.
ONE = """\
HloModule one, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

ENTRY %main (g: f32[16]) -> f32[16] {{
  %g = f32[16]{{0}} parameter(0)
  ROOT %moved = f32[16]{{0}} {kind}(%g), {groups}{more}
}}
"""
SUM = ", to_apply=%add"
PAYLOAD = 64


@pytest.mark.parametrize(
    ("groups", "size", "of_two", "of_four"),
    [
        # One ring over all: one device of each host sends to the next host.
        ("replica_groups={}", 8, 1, 1),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", 8, 1, 1),
        ("replica_groups=[1,8]<=[8]", 8, 1, 1),
        ("replica_groups=mesh['fsdp'=8] {'fsdp'}", 8, 1, 1),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}", 8, 1, 1),
        # Within two hosts; four hosts have two devices each, so that a group spans two of them.
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4, 0, 1),
        ("replica_groups=[2,4]<=[8]", 4, 0, 1),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}", 4, 0, 1),
        # Across: each of a host's devices has a ring of its own.
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 2, 4, 2),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2, 4, 2),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data'}", 2, 4, 2),
        ("replica_groups=[4,2]<=[4,2]", 2, 0, 0),
        # The devices of a mesh in another order, counted and listed, and parts of an axis.
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", 4, 2, 2),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([8]) {'b'}", 4, 0, 1),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", 4, 2, 2),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", 2, 0, 0),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", 2, 4, 2),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", 2, 0, 2),
        ("replica_groups=mesh['a'=8] {'a':(4)2}", 2, 0, 0),
    ],
)
def test_each_ring_leaves_a_host_once(groups: str, size: int, of_two: int, of_four: int) -> None:
    text = ONE.format(kind="all-reduce", groups=groups, more=SUM)
    sent = PAYLOAD * (size - 1) * 2 // size
    for hosts, rings in ((1, 0), (2, of_two), (4, of_four)):
        (moved,) = CollectiveLedger.from_hlo(text, hosts=hosts).collectives
        assert (moved.group_size, moved.wire_bytes) == (size, sent)
        assert moved.host_bytes == rings * sent


@pytest.mark.parametrize(
    "groups",
    [
        "replica_groups=mesh['x'=2,'y'=4], device_ids=(another) {'y'}",
        "replica_groups=mesh['x'=8] {'x':another}",
        "replica_groups=another",
    ],
)
def test_groups_in_another_form_are_refused_and_not_taken_for_all_devices(groups: str) -> None:
    text = ONE.format(kind="all-reduce", groups=groups, more=SUM)
    with pytest.raises(SpmdZeroUsageError, match=r"groups can't be read: .replica_groups="):
        CollectiveLedger.from_hlo(text)


def test_pairs_and_parts_go_from_device_to_device() -> None:
    pairs = ONE.format(
        kind="collective-permute", groups="source_target_pairs={{0,1},{3,4},{2,6},{5,0}}", more=""
    )
    ledger = CollectiveLedger.from_hlo(pairs, hosts=2)
    # 3 to 4 and 2 to 6 leave the first host, 5 to 0 the second.
    assert ledger.host_bytes == 2 * PAYLOAD
    parts = ONE.format(
        kind="all-to-all", groups="replica_groups=[1,8]<=[8]", more=", dimensions={0}"
    )
    # Each of four devices sends an eighth of its tensor to each of the other host's four.
    assert CollectiveLedger.from_hlo(parts, hosts=2).host_bytes == 4 * 4 * PAYLOAD // 8


@pytest.mark.parametrize(
    ("groups", "hosts"),
    [
        ("replica_groups={}", {2, 4}),
        ("replica_groups=[2,4]<=[8]", {4}),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", {2, 4}),
        ("replica_groups=[4,2]<=[4,2]", set()),
    ],
)
def test_a_collective_within_each_host_is_no_meeting_of_hosts(groups: str, hosts: set[int]) -> None:
    text = ONE.format(kind="all-reduce", groups=groups, more=SUM)
    assert {count for count in (2, 4) if between_hosts(text, hosts=count)} == hosts


def test_what_hosts_exchange_is_told_apart_by_its_order_shapes_and_names() -> None:
    def exchanged(*names: str) -> tuple[str, ...]:
        lines = [
            f"  %r.{n} = f32[16]{{0}} all-reduce-start(%g), replica_groups={{}}, to_apply=%add, "
            f'metadata={{op_name="{name}"}}'
            for n, name in enumerate(names)
        ]
        return between_hosts("\n".join(["HloModule a, num_partitions=8", *lines]), hosts=2)

    assert len(exchanged("one", "two")) == 2
    assert exchanged("one", "two") != exchanged("two", "one")
