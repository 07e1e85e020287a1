"""DeepSpeed's compiled kernels pass from run to run, and a killed run's unfinished ones don't."""

from pathlib import Path

import pytest

from tests.benchmarks.harness.ranks import rank_environments

pytestmark = pytest.mark.backends("any")


def compile_in(told: list[dict[str, str]], name: str, text: str, *, ended: bool = True) -> None:
    """What torch leaves of compiling a kernel, or of a process killed while it did."""
    folder = Path(told[0]["TORCH_EXTENSIONS_DIR"]) / name
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.so").write_text(text)
    if not ended:
        (folder / "lock").touch()


def seen_by(told: list[dict[str, str]]) -> dict[str, str]:
    folders = {Path(rank["TORCH_EXTENSIONS_DIR"]) for rank in told}
    assert len(folders) == 1
    return {file.name: file.read_text() for file in folders.pop().rglob("*") if file.is_file()}


def test_a_run_finds_what_an_earlier_one_compiled(tmp_path: Path) -> None:
    kept = tmp_path / "kernels"
    with rank_environments(2, threads=1, kept=kept) as told:
        assert seen_by(told) == {}
        compile_in(told, "adam", "first")
    with rank_environments(2, threads=1, kept=kept) as told:
        compile_in(told, "shm", "second")
    with rank_environments(2, threads=1, kept=kept) as told:
        assert seen_by(told) == {"adam.so": "first", "shm.so": "second"}
    assert [path.name for path in tmp_path.iterdir()] == ["kernels"]


def test_a_lock_that_a_killed_process_left_is_met_by_nobody(tmp_path: Path) -> None:
    kept = tmp_path / "kernels"
    with rank_environments(2, threads=1, kept=kept) as told:
        compile_in(told, "shm", "half", ended=False)
    with rank_environments(2, threads=1, kept=kept) as told:
        assert seen_by(told) == {}


def test_runs_at_once_have_copies_of_their_own(tmp_path: Path) -> None:
    kept = tmp_path / "kernels"
    with rank_environments(2, threads=1, kept=kept) as one:
        with rank_environments(2, threads=1, kept=kept) as other:
            compile_in(other, "shm", "theirs", ended=False)
            assert seen_by(one) == {}
            compile_in(one, "shm", "ours")
            compile_in(other, "adam", "theirs")
        compile_in(one, "adam", "ours")
    with rank_environments(2, threads=1, kept=kept) as told:
        assert seen_by(told) == {"adam.so": "theirs", "shm.so": "ours"}


def test_each_rank_is_told_which_it_is(tmp_path: Path) -> None:
    with rank_environments(3, threads=2, kept=tmp_path / "kernels") as told:
        assert [rank["RANK"] for rank in told] == [rank["LOCAL_RANK"] for rank in told]
        assert [rank["RANK"] for rank in told] == ["0", "1", "2"]
        assert {rank["WORLD_SIZE"] for rank in told} == {"3"}
        assert len({rank["MASTER_PORT"] for rank in told}) == 1
        assert {rank["OMP_NUM_THREADS"] for rank in told} == {"2"}
