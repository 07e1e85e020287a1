"""What spmdzero logs, prints and writes comes from the first host; what scripts say from each."""

from pathlib import Path

import pytest

from tests.hosts.hosts import hosts

SAID = ("step=", "time (ms)", "flops", "live tensors", "config keys without effect")


@pytest.mark.slow
def test_reports_come_once(tmp_path: Path) -> None:
    folder = tmp_path / "csv"
    with hosts("tests.hosts.reporting", str(folder), count=2, devices=2) as both:
        assert [host.wait(300) for host in both] == [0, 0], [
            host.said()[1][-3000:] for host in both
        ]
        assert both[0].result() == both[1].result()
        first, second = (out + errors for out, errors in (host.said() for host in both))
    for line in SAID:
        assert line in first
        assert line not in second
    for rank, text in enumerate((first, second)):
        assert f"my own line of host {rank}" in text
        assert f"a warning of host {rank}" in text
    assert "said by the second" in second
    assert "said by the second" not in first
    assert "[INFO] [spmdzero] my own line" in second
    losses = (folder / "job" / "Train_Samples_train_loss.csv").read_text().splitlines()
    # A head, and a row for each step.
    assert len(losses) == 11
