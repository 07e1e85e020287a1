"""Starts a program as real DeepSpeed's ranks: one process each, gloo, no launcher."""

import importlib.util
import tempfile
from pathlib import Path

from tests.benchmarks.harness.processes import run_together
from tests.benchmarks.harness.ranks import rank_environments
from tests.support.processes import environment


def require_deepspeed() -> None:
    """Fails, rather than skips: without its peer a comparison says nothing."""
    assert importlib.util.find_spec("deepspeed"), (
        "real DeepSpeed is not installed, which this test compares with: pip install -e '.[oracle]'"
    )


def run_ranks(
    arguments: list[str], *, ranks: int, cwd: Path, timeout: float, **variables: str
) -> list[str]:
    """Runs `python *arguments` once for each rank; returns what each printed, by rank.

    `variables` are added to what a rank is told.

    Raises:
        AssertionError: DeepSpeed is missing.
        ProcessFailedError: a rank failed or ran past `timeout` seconds; holds the end of what it
            wrote.
    """
    require_deepspeed()
    left = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS")
    inherited = {name: value for name, value in environment().items() if name not in left}
    with (
        tempfile.TemporaryDirectory() as scratch,
        rank_environments(ranks, threads=1) as told,
    ):
        folder = Path(scratch)
        run_together(
            [arguments] * ranks,
            [inherited | more | variables for more in told],
            cwd=cwd,
            folder=folder,
            timeout=timeout,
        )
        return [(folder / f"{rank}.out").read_text() for rank in range(ranks)]
