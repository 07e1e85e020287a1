"""What hosts come to together: whoever comes to something else is found, ahead or behind."""

import pytest

from spmdzero.backend.hosts._joint import Joint

pytestmark = pytest.mark.backends("any")


def said(own: list[str], others: list[str]) -> str:
    """What a host that came to `own` says of one that came to `others`."""
    here, there = Joint(), Joint()
    for joint, places in ((here, own), (there, others)):
        for place in places:
            joint.come_to(place)
    return here.apart(there.latest, here="host 0")


@pytest.mark.parametrize(
    ("own", "others"),
    [([], []), (["a", "b"], ["a", "b"]), (["a", "b", "c"], ["a"]), (["a"], ["a", "b", "c"])],
)
def test_hosts_that_do_the_same_are_well_also_ahead_of_each_other(
    own: list[str], others: list[str]
) -> None:
    assert not said(own, others)


def test_a_host_that_came_to_something_else_is_found_by_the_one_that_is_ahead() -> None:
    found = said(["a", "b", "c"], ["a", "x"])
    assert found.startswith("came to x, host 0 to b: they never meet. Every host has to do")


def test_a_host_that_came_to_the_same_by_another_way_is_found() -> None:
    # Neither waited for the other: a tensor of the one was exchanged for another of the other.
    found = said(["a", "b", "c"], ["a", "x", "c"])
    assert found.startswith("came to c by another way than host 0. Every host has to do")


def test_where_each_host_is_in_the_script_is_told_and_the_likely_cause() -> None:
    here, there = Joint(), Joint()
    for joint, what, where in ((here, "b", "train.py:31"), (there, "x", "train.py:30")):
        joint.come_to("a", where=f"load.py:{len(where)}")
        joint.come_to(what, where=where)
    found = here.apart(there.latest, here="host 0")
    assert found.startswith("came to x (train.py:30), host 0 to b (train.py:31): they never meet.")
    assert "`if rank == 0: print(loss.item())`" in found
    # The same from another line is the same.
    other = Joint()
    other.come_to("a", where="elsewhere.py:1")
    assert not here.apart(other.latest, here="host 0")


def test_what_is_part_of_something_is_told_with_it() -> None:
    here, there = Joint(), Joint()
    for joint, batch in ((here, "training"), (there, "evaluation")):
        joint.come_to(batch)
        joint.come_to("a program", part=True)
    found = here.apart(there.latest, here="host 0")
    assert found.startswith("came to a program after evaluation, host 0 to a program after train")
