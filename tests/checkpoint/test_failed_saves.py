"""A save that fails says why, and leaves the checkpoints before it and `latest` as they were."""

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import spmdzero
from spmdzero.errors import SpmdZeroCheckpointError
from spmdzero.formats import BackgroundSaver, Retention, complete_tags, latest_tag, newest_complete
from tests.checkpoint.files import interrupted, number_in, save
from tests.checkpoint.runs import assert_state, config, start, train, whole_state
from tests.support.processes import fork

NEEDING_SPACE = ("mkdir", "open", "write", "fsync", "replace")
NO_SPACE = OSError(28, "No space left on device", "the disk")
ASYNC = {"checkpoint": {"async": True, "keep_last": 2}}


def in_a_child(act: Callable[[], None]) -> str:
    """What a child process that does `act` gets as a SpmdZeroCheckpointError; fails without."""
    read, write = os.pipe()
    child = fork()
    if child == 0:
        try:
            act()
            os.write(write, b"no error")
        except SpmdZeroCheckpointError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def unchanged(folder: Path) -> None:
    assert latest_tag(folder) == "step1"
    assert number_in(folder, "step1") == 1
    assert [found.tag for found in complete_tags(folder)] == ["step1"]


def test_a_full_disk_fails_and_leaves_no_remains(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = sorted(tmp_path.rglob("*"))

    def save_on_a_full_disk() -> None:
        # The system's answer to a write beyond it is EFBIG, without the signal.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
        save(tmp_path, 2)

    said = in_a_child(save_on_a_full_disk)
    assert "File too large" in said
    assert "'step1'" in said
    assert "tensors-" in said
    unchanged(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_no_space_at_any_operation_leaves_what_was_there(folder: Path) -> None:
    seen: list[str] = []
    save(folder / "count", 1)
    with interrupted(lambda _, name: seen.append(name)):
        save(folder / "count", 2)
    for point, operation in enumerate(seen):
        if operation not in NEEDING_SPACE:
            continue
        root = folder / f"{operation} {point}"
        save(root, 1)

        def fail(count: int, name: str, point: int = point) -> None:
            if count == point:
                raise NO_SPACE

        with interrupted(fail), pytest.raises(SpmdZeroCheckpointError, match="No space left"):
            save(root, 2)
        assert number_in(root, "step1") == 1
        # Past the commit it is the new one that is complete, and only `latest` that was not moved.
        good = newest_complete(root)
        assert good is not None
        assert number_in(root, good) in (1, 2)
        assert latest_tag(root) in ("step1", "step2")
        save(root, 3)
        assert latest_tag(root) == "step3"


def test_a_failed_save_deletes_nothing_of_a_newer_format(folder: Path) -> None:
    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (folder / "step1").iterdir()}

    save(folder, 1)
    commit = folder / "step1" / "COMMITTED"
    commit.write_text(commit.read_text().replace("checkpoint 1:", "checkpoint 2:"))
    before, failed = contents(), list[str]()
    while commit.read_bytes() == before["COMMITTED"]:
        assert contents() == before, f"after {failed}"
        seen: list[str] = []

        def fail(_: int, name: str, seen: list[str] = seen) -> None:
            if name in NEEDING_SPACE:
                seen.append(name)
                if len(seen) > len(failed):
                    raise NO_SPACE

        with interrupted(fail), contextlib.suppress(SpmdZeroCheckpointError):
            save(folder, 2, tag="step1")
        failed.append(seen[-1])
    # Up to the one after the new commit, by which it is what was asked for.
    assert len(failed) > 12
    assert number_in(folder, "step1") == 2


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    save(tmp_path / "runs", 1)
    os.chmod(tmp_path / "runs", 0o555)
    os.chmod(tmp_path, 0o755)

    def save_as_nobody() -> None:
        for parent in tmp_path.parents:
            if parent.stat().st_uid == 0 and parent.name.startswith(("pytest", "popen")):
                os.chmod(parent, 0o755)  # pytest's own, and its workers'
        if os.getuid() == 0:
            os.setuid(65534)  # root may write anywhere
        save(tmp_path / "runs", 2)

    said = in_a_child(save_as_nobody)
    os.chmod(tmp_path / "runs", 0o755)
    assert "Permission denied" in said
    assert str(tmp_path / "runs") in said
    unchanged(tmp_path / "runs")


def test_a_second_saver_in_the_same_folder_is_refused_while_the_first_saves(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1)
    inside, go_on = threading.Event(), threading.Event()

    def wait_at_the_third(count: int, name: str) -> None:
        if threading.current_thread() is first and name == "fsync" and not inside.is_set():
            inside.set()
            assert go_on.wait(60)

    with interrupted(wait_at_the_third):
        first = threading.Thread(target=save, args=(tmp_path, 2))
        first.start()
        assert inside.wait(60)
        said = in_a_child(lambda: save(tmp_path, 3))
        go_on.set()
        first.join()
    assert "another process is saving" in said
    assert number_in(tmp_path, "step2") == 2
    assert latest_tag(tmp_path) == "step2"
    assert not (tmp_path / "step3").exists()
    save(tmp_path, 3)


def test_a_folder_of_other_files_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "step1").mkdir()
    (tmp_path / "step1" / "notes.txt").write_text("mine")
    save(tmp_path, 1)
    save(tmp_path, 2, retention=Retention(last=1))
    assert (tmp_path / "step1" / "notes.txt").read_text() == "mine"
    assert [found.tag for found in complete_tags(tmp_path)] == ["step2"]


def test_retention_keeps_the_newest_and_every_nth_and_what_latest_never_named(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1, tag="best", latest=False)
    for number in range(1, 8):
        save(tmp_path, number + 16, nonce=f"{number + 16:08x}", tag=f"step{number}",
             description={"counters": {"global_steps": number}},
             retention=Retention(last=2, every=3))  # fmt: skip
    kept = [found.tag for found in complete_tags(tmp_path)]
    assert kept == ["step7", "step6", "step3", "best"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == sorted(kept)


def test_retention_never_deletes_what_latest_names(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path, number)
    (tmp_path / "latest").write_text("step1")
    save(tmp_path, 4, latest=False, retention=Retention(last=1))
    assert latest_tag(tmp_path) == "step1"
    assert number_in(tmp_path, "step1") == 1


def test_background_saves_run_one_at_a_time_and_in_order() -> None:
    saver, running, ended = BackgroundSaver(), threading.Lock(), list[int]()

    def job(number: int) -> None:
        assert running.acquire(blocking=False), "two saves at once"
        threading.Event().wait(0.01)
        ended.append(number)
        running.release()

    for number in range(8):
        saver.start(lambda number=number: job(number))
    saver.wait()
    assert ended == list(range(8))


@pytest.fixture(scope="module")
def engine() -> spmdzero.Engine:
    engine = start(config(2, gas=2, **ASYNC))
    train(engine, range(2))
    return engine


def test_an_asynchronous_save_holds_the_state_of_its_call(
    engine: spmdzero.Engine, tmp_path: Path
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(count: int, name: str) -> None:
        if threading.current_thread().name.startswith("spmdzero-save"):
            entered.set()
            assert go_on.wait(60)

    before = whole_state(engine)
    with interrupted(hold):
        engine.save_checkpoint(tmp_path, tag="then")
        assert entered.wait(60)
        # The devices reuse the buffers of the state, which must not be those being saved.
        train(engine, range(5, 9))
        assert not (tmp_path / "latest").exists()
        go_on.set()
        engine.wait_checkpoint()
    assert not all(torch.equal(t, before[name]) for name, t in whole_state(engine).items())
    engine.load_checkpoint(tmp_path)
    assert_state(engine, before)


def test_the_failure_of_an_asynchronous_save_is_raised_by_the_next_call(
    engine: spmdzero.Engine, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for call in (
        lambda: engine.save_checkpoint(tmp_path / "good"),
        engine.wait_checkpoint,
        lambda: engine.load_checkpoint(tmp_path / "good"),
    ):
        engine.save_checkpoint(tmp_path / "file")
        with pytest.raises(SpmdZeroCheckpointError, match="file"):
            call()
    engine.wait_checkpoint()
    assert engine.save_checkpoint(tmp_path / "good")
    engine.wait_checkpoint()


def test_saves_that_follow_each_other_at_once_are_all_complete(
    engine: spmdzero.Engine, tmp_path: Path
) -> None:
    for number in range(5):
        engine.save_checkpoint(tmp_path, tag=f"t{number}")
    engine.destroy()
    assert [found.tag for found in complete_tags(tmp_path)] == ["t4", "t3"]
    assert latest_tag(tmp_path) == "t4"
