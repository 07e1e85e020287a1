"""Several processes save one checkpoint: each its own pieces, none a whole tensor."""

import concurrent.futures
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from spmdzero.errors import SpmdZeroCheckpointError, UsageAssertionError
from spmdzero.formats import (
    SaveOrder,
    StoredTensor,
    TrainingState,
    complete_tags,
    held_for,
    latest_tag,
    open_state,
    save_native,
)
from spmdzero.formats.native import _processes, _unfinished, _write
from spmdzero.state._same_on_hosts import agreed_tag, require_one_tag
from tests.checkpoint.files import number_in, order_of, save, state_of
from tests.support.processes import fork

OWN, COMMON = "each host's own", "the same on all hosts"
PROCESSES = 3


def part_of(process: int) -> TrainingState:
    """Of each tensor the first two hosts have one of the two pieces."""
    whole = state_of(1)
    mine = {
        name: dataclasses.replace(tensor, pieces=tensor.pieces[process : process + 1])
        for name, tensor in whole.tensors.items()
    }
    rng = {OWN: torch.tensor([process]), COMMON: [3, [1, 2], None]}
    return dataclasses.replace(
        whole, tensors=mine, host=dataclasses.replace(whole.host, applied=process, rng=rng)
    )


def order_for(folder: Path, process: int, processes: int) -> SaveOrder:
    return order_of(folder, 1, process=process, processes=processes)


def save_part(folder: Path, process: int, processes: int = 2) -> None:
    save_native(part_of(process), order_for(folder, process, processes))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("of two")
    child = fork()
    if child == 0:
        try:
            save_part(folder, 1)
        finally:
            os._exit(0)
    save_part(folder, 0)
    assert os.waitpid(child, 0) == (child, 0)
    return folder


def test_two_processes_make_one_checkpoint_of_their_pieces(of_two: Path) -> None:
    assert number_in(of_two, "step1") == 1
    (found,) = complete_tags(of_two)
    kinds = sorted(path.name.split("-")[0] for path in (of_two / "step1").iterdir())
    assert kinds == ["COMMITTED", "manifest", "state", "state", "tensors", "tensors"]
    assert len(found.manifest.contents.states) == 2


def test_a_host_goes_on_with_its_own_generators_and_a_new_one_with_those_of_all(
    of_two: Path,
) -> None:
    # Two hosts that draw the same numbers would repeat each other's noise.
    for process, applied in ((0, 0), (1, 1), (2, 0), (7, 0)):
        found = open_state(of_two, "step1", process=process).host
        assert found.applied == applied
        assert found.rng is not None
        assert found.rng.pop(COMMON) == [3, [1, 2], None]  # type: ignore[attr-defined]
        own = {name: state.item() for name, state in found.rng.items()}
        assert own == ({OWN: process} if process < 2 else {})


def test_a_run_of_one_host_hands_its_generators_to_all(tmp_path: Path) -> None:
    alone = dataclasses.replace(state_of(1), host=part_of(0).host)
    save_native(alone, order_for(tmp_path, 0, 1))
    found = open_state(tmp_path, "step1", process=1).host
    assert found.rng is not None
    assert found.rng.keys() == {OWN, COMMON}


def unreadable(state: TrainingState) -> TrainingState:
    def fail(box: Any) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    broken = StoredTensor(shape=(2,), dtype=torch.float32, read=fail, pieces=(((0, 2),),))
    return dataclasses.replace(state, tensors={**state.tensors, "parameter/b": broken})


def unsafe(state: TrainingState) -> TrainingState:
    host = dataclasses.replace(state.host, client_state={"args": object()})
    return dataclasses.replace(state, host=host)


FAILURES: dict[str, tuple[int, Callable[[TrainingState], TrainingState], str]] = {
    "the first before it begins": (0, unsafe, r"client_state\['args'\]"),
    "the first while it writes": (0, unreadable, "the device is gone"),
    "another before it begins": (2, unsafe, r"client_state\['args'\]"),
    "another while it writes": (1, unreadable, "the device is gone"),
}


def save_in_all(
    folder: Path,
    change: Callable[[int, TrainingState], TrainingState] = lambda _, state: state,
    nonce: str = "00000001",
) -> list[Exception | None]:
    """What each of three processes raises."""
    raised: list[Exception | None] = [None] * PROCESSES

    def run(process: int) -> None:
        try:
            state = change(process, part_of(process))
            order = order_for(folder, process, PROCESSES)
            save_native(state, dataclasses.replace(order, nonce=nonce))
        except Exception as error:
            raised[process] = error

    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(run, range(PROCESSES)))
    return raised


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    # Who isn't told says after a while that it waited, which is no reason that a test expects.
    monkeypatch.setattr(_processes, "PATIENCE", 60.0)


def test_the_others_need_not_wait_for_the_tags_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = _write.begin

    def slowly(order: SaveOrder) -> None:
        begin(order)
        # The others look every 0.05 s.
        time.sleep(0.5)

    monkeypatch.setattr(_write, "begin", slowly)
    assert save_in_all(tmp_path) == [None] * PROCESSES


@pytest.mark.parametrize(("failing", "change", "reason"), FAILURES.values(), ids=FAILURES)
def test_what_one_process_fails_with_is_raised_by_all_of_them(
    tmp_path: Path, failing: int, change: Callable[[TrainingState], TrainingState], reason: str
) -> None:
    save(tmp_path, 2)
    raised = save_in_all(tmp_path, lambda p, state: change(state) if p == failing else state)
    own = raised.pop(failing)
    assert isinstance(own, RuntimeError)
    assert not isinstance(own, SpmdZeroCheckpointError)
    for error in raised:
        assert isinstance(error, SpmdZeroCheckpointError)
        assert f"process {failing}: " in error.reason
        assert re.search(reason, str(error))
        assert error.newest == "step2"
    assert [found.tag for found in complete_tags(tmp_path)] == ["step2"]
    assert number_in(tmp_path, "step2") == 2
    # Nothing of it stands in the way of the next.
    assert save_in_all(tmp_path, nonce="0000000b") == [None] * PROCESSES


def test_a_lock_that_is_taken_is_told_to_the_processes_that_need_no_lock(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with filelock.FileLock(tmp_path / ".spmdzero.lock"):
        raised = save_in_all(tmp_path)
    for error in raised:
        assert isinstance(error, SpmdZeroCheckpointError)
        assert "another process is saving into this folder" in error.reason
        assert (error.newest, error.fix) == ("step2", "Give each run a folder of its own")
    # The other run may be saving this very tag.
    assert not (tmp_path / "step1").exists()


def test_a_failure_after_the_commit_is_raised_by_all_of_them_too(tmp_path: Path) -> None:
    (tmp_path / "latest" / "folder").mkdir(parents=True)
    raised = save_in_all(tmp_path)
    assert all(isinstance(error, SpmdZeroCheckpointError) for error in raised)
    assert all("Is a directory" in str(error) for error in raised)
    shutil.rmtree(tmp_path / "latest")
    save(tmp_path, 2)
    assert sorted(found.tag for found in complete_tags(tmp_path)) == ["step1", "step2"]
    assert not [path for path in (tmp_path / "step1").iterdir() if "part" in path.name]
    assert latest_tag(tmp_path) == "step2"


def test_a_report_of_a_failure_is_removed_once_nobody_can_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_in_all(tmp_path, lambda process, state: unsafe(state) if process == 0 else state)
    (report,) = tmp_path.glob(".saving-*")
    save(tmp_path, 2)
    assert report.exists(), "another host may not have looked yet"
    monkeypatch.setattr(_unfinished, "PATIENCE", -1.0)
    save(tmp_path, 3)
    assert not report.exists()


def test_a_state_that_can_not_be_kept_for_a_background_save_fails_in_all_processes(
    tmp_path: Path,
) -> None:
    with pytest.raises(RuntimeError, match="the device is gone"):
        held_for(order_for(tmp_path, 1, 2), unreadable(part_of(1)))
    with pytest.raises(SpmdZeroCheckpointError, match="process 1: RuntimeError: the device"):
        save_part(tmp_path, 0)


def test_tags_that_differ_between_processes_stop_all_of_them_or_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tags = ["a", "a", "b"]
    for mine in tags:
        # An AssertionError, as DeepSpeed's.
        with pytest.raises(UsageAssertionError, match=r"the tags \['a', 'a', 'b'\]"):
            agreed_tag(tags, mine=mine, validation="FAIL")
        assert agreed_tag(tags, mine=mine, validation="WARN") == "a"
        assert agreed_tag(tags, mine=mine, validation="IGNORE") == "a"
    (warning,) = caplog.messages
    assert "saves the tag 'b', the first one 'a'" in warning


def test_processes_that_would_load_other_states_all_stop(tmp_path: Path) -> None:
    for same in (["step1", "step1"], [None, None]):
        require_one_tag(tmp_path, same)
    for found in (["step1", "step2"], ["step1", None]):
        with pytest.raises(SpmdZeroCheckpointError, match=r"'step1', .*every process"):
            require_one_tag(tmp_path, found)
