"""A model that is built inside of `zero.Init` has the first host's values on all of them."""

import pytest

from tests.hosts.hosts import run_hosts


@pytest.mark.slow
def test_hosts_with_seeds_of_their_own_build_the_first_ones_model() -> None:
    first, second = run_hosts("tests.hosts.building", count=2, devices=2)
    assert first == second
    assert first["split"] == [True, True]
    (alone,) = run_hosts("tests.hosts.building", count=1, devices=4)
    assert alone["sums"] == first["sums"]
    assert alone["losses"] == pytest.approx(first["losses"], rel=1e-6)
