"""Texts of different lengths on several hosts, whose rows are one batch."""

import pytest

from tests.hosts.hosts import run_hosts


def test_hosts_agree_on_the_length_of_each_batch() -> None:
    both = run_hosts("tests.hosts.lengths", count=2, devices=2)
    (alone,) = run_hosts("tests.hosts.lengths", count=1, devices=4)
    ours, others = ([length for length, _ in host] for host in both)
    # The first is as long as the longest row of all, the second host's, and so is the last.
    assert ours == others == [length for length, _ in alone] == [31, 128, 64, 192, 31]
    losses, right = ([loss for _, loss in host] for host in (both[0], alone))
    # fp32: sums over other numbers of zeros.
    assert losses == pytest.approx(right, rel=1e-5)
