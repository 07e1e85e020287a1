"""How processes find each other, and that one alone stays alone."""

import pytest

from spmdzero.backend.hosts import _launched
from spmdzero.errors import UsageValueError
from tests.hosts.hosts import by_slurm, run_hosts, told

CASES = {"it": {"steps": 3}}


@pytest.mark.slow
def test_processes_of_slurms_are_found_as_jax_finds_them() -> None:
    (alone,) = run_hosts("tests.hosts.training", told(CASES), count=1, devices=4)
    first, second = run_hosts(
        "tests.hosts.training", told(CASES), count=2, devices=2, place=by_slurm
    )
    assert first == second
    assert first["it"]["world"] == 4
    assert first["it"]["losses"] == pytest.approx(alone["it"]["losses"], abs=1e-6, rel=0)


@pytest.mark.parametrize(
    "variables", [{}, {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}]
)
def test_a_process_that_nobody_joins_is_alone(variables: dict[str, str]) -> None:
    # The second is what a batch script of eight tasks has that runs Python without srun.
    (found,) = run_hosts("tests.hosts.alone", count=1, devices=3, place=lambda *_: variables)
    assert found == {"processes": 1, "world": 1, "devices": 3}


@pytest.mark.parametrize("given", ["ten", "0", "-3", "1.5", ""])
def test_minutes_to_wait_that_are_no_number_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", given)
    with pytest.raises(UsageValueError, match=f"DEEPSPEED_TIMEOUT='{given}': .* such as 10"):
        _launched._timeout()


@pytest.mark.slow
def test_hosts_of_a_group_wait_for_each_other_as_long_as_the_group_says() -> None:
    # Longer than they once did.
    assert run_hosts("tests.hosts.late", "70", count=2, devices=1) == [2, 2]
